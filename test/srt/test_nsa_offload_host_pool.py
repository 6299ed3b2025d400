"""The host pool of latent rows: layout, size, and what happens when memory is short."""

import ctypes
import gc
import mmap
import os
import sys
import tempfile
import threading
import unittest
from pathlib import Path
from types import ModuleType, SimpleNamespace
from unittest import mock

import torch

if not torch.cuda.is_available():
    os.environ.setdefault("SGLANG_USE_CPU_ENGINE", "1")

from sglang.srt.mem_cache.memory_pool import NSATokenToKVPool
from sglang.srt.mem_cache.sparsity.nsa_offload import host_memory, host_pool
from sglang.srt.mem_cache.sparsity.nsa_offload.host_memory import HostBuffer
from sglang.srt.mem_cache.sparsity.nsa_offload.host_pool import (
    NSAKVOnlyTokenToKVPoolHost,
    check_host_memory,
)
from sglang.test.test_utils import CustomTestCase

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
PAGE, LAYERS, SLOTS = 64, 3, 256
ROWS = SLOTS + PAGE
DTYPES = ((torch.float8_e4m3fn, 656, 656), (torch.bfloat16, 576, 1152))  # dtype, dim, row bytes


def make_pool(dtype, dim, start_layer=0, memory="managed" if DEVICE == "cuda" else "plain"):
    device_pool = NSATokenToKVPool(
        SLOTS,
        page_size=PAGE,
        dtype=dtype,
        kv_lora_rank=512,
        qk_rope_head_dim=64,
        layer_num=LAYERS,
        device=DEVICE,
        index_head_dim=128,
        enable_memory_saver=False,
        kv_cache_dim=dim,
        start_layer=start_layer,
        end_layer=start_layer + LAYERS - 1,
    )
    return NSAKVOnlyTokenToKVPoolHost(device_pool, memory)


class TestHostPool(CustomTestCase):
    def test_layout(self):
        for dtype, dim, row_bytes in DTYPES:
            with self.subTest(dtype=dtype):
                pool = make_pool(dtype, dim, start_layer=2)
                self.addCleanup(pool.close)
                self.assertEqual(pool.kv_buffer.shape, (LAYERS, ROWS, 1, dim))
                self.assertEqual(pool.row_bytes, row_bytes)
                self.assertEqual(pool.size, ROWS)
                self.assertEqual(pool.size, pool.rows_for(SLOTS, PAGE))
                self.assertEqual(pool.kv_buffer.nbytes, LAYERS * ROWS * row_bytes)
                self.assertEqual(pool.size_per_token, LAYERS * row_bytes)
                self.assertEqual(pool.kv_buffer.device.type, "cpu")
                self.assertTrue(pool.kv_buffer.is_contiguous())
                self.assertEqual(pool.kv_buffer.dtype, pool.device_pool.store_dtype)
                self.assertEqual(pool.kv_buffer.data_ptr() % 4096, 0)
                self.assertFalse(pool.kv_buffer.view(torch.uint8).any())

    def test_exactly_the_bytes_asked_for(self):
        for dtype, dim, row_bytes in DTYPES:
            with mock.patch.object(host_pool, "HostBuffer", wraps=HostBuffer) as made:
                make_pool(dtype, dim).close()
            self.assertEqual(made.call_args.args[0], LAYERS * ROWS * row_bytes)

    def test_addresses(self):
        for dtype, dim, row_bytes in DTYPES:
            with self.subTest(dtype=dtype):
                pool = make_pool(dtype, dim)
                self.addCleanup(pool.close)
                first = pool.kv_buffer.data_ptr()
                expected = [first + layer * ROWS * row_bytes for layer in range(LAYERS)]
                pointers, lengths, items = pool.get_contiguous_buf_infos()
                self.assertEqual(pointers, expected)
                self.assertEqual(pool.layer_ptrs.tolist(), expected)
                self.assertEqual(pool.layer_ptrs.dtype, torch.uint64)
                self.assertEqual(pool.layer_ptrs.device.type, DEVICE)
                self.assertEqual(lengths, [ROWS * row_bytes] * LAYERS)
                self.assertEqual(items, [PAGE * row_bytes] * LAYERS)
                # Item n of a layer is page n: what a transfer engine writes is what is read.
                pool.kv_buffer[1, 2 * PAGE].view(torch.uint8).fill_(7)
                offset = pointers[1] + 2 * items[1] - first
                flat = pool.kv_buffer.view(torch.uint8).flatten()
                self.assertTrue((flat[offset : offset + row_bytes] == 7).all())
                self.assertEqual(int((flat != 0).sum()), row_bytes)

    def test_queue_of_its_rows(self):
        """Scattered rows of managed memory cost little more than others: fewer are put in order."""
        for memory, order_min_rows in (("plain", 1024), ("managed", 16384)):
            with mock.patch.object(host_pool, "HostBuffer", lambda *args, **kw: HostBuffer(args[0], "plain")):
                pool = make_pool(*DTYPES[0][:2], memory=memory)
            queue = pool.miss_queue(3, 32)
            self.assertEqual(queue.order_min_rows, order_min_rows)
            self.assertEqual(len(queue.target), ROWS)
            self.assertEqual(len(queue.host_slots), 2 * 3 * 32)

    def test_close_twice(self):
        for memory in ("pinned", "managed") if DEVICE == "cuda" else ("plain",):
            pool = make_pool(*DTYPES[0][:2], memory=memory)
            pool.close()
            pool.close()
        if memory == "plain":
            pool.kv_buffer.view(torch.uint8).fill_(1)  # the memory outlives its owner

    @unittest.skipUnless(DEVICE == "cuda", "needs a GPU")
    def test_pinned(self):
        pool = make_pool(*DTYPES[0][:2], memory="pinned")
        self.assertTrue(pool.kv_buffer.is_pinned())
        pool.close()
        self.assertFalse(pool.kv_buffer.is_pinned())

    @unittest.skipUnless(DEVICE == "cuda", "needs a GPU")
    def test_rows_of_managed_memory_both_ways(self):
        """Byte for byte, in either order of the rows, into memory that starts as zeros."""
        from sglang.jit_kernel import nsa_kv_offload as kernels

        count, rows, row_bytes = 5000, 1 << 18, 656
        buffer = HostBuffer(rows * row_bytes, "managed")
        self.assertFalse(buffer.tensor.any())
        host = buffer.tensor.view(rows, row_bytes)
        host.random_(0, 256)
        before, slots = host.clone(), torch.randperm(rows)[:count].to(DEVICE)
        for order_min_rows in (0, 1 << 30):
            queue = kernels.MissQueue(1, count, rows, DEVICE, order_min_rows)
            queue.host_slots[:count] = slots.int()
            queue.device_slots[:count] = queue.target[slots] = torch.arange(count, device=DEVICE).int()
            bits = torch.zeros((rows,), dtype=torch.int64, device=DEVICE)
            bits[slots] = 1
            words = (bits.view(-1, 32) << torch.arange(32, device=DEVICE)).sum(1)
            queue.wanted.copy_((words - (words >> 31 << 32)).int())
            queue.state[0] = count
            device = torch.zeros((count, row_bytes), dtype=torch.uint8, device=DEVICE)
            kernels.gather_misses(host, device, queue)
            self.assertTrue(torch.equal(device.cpu(), before[slots.cpu()]))
        device.random_(0, 256)

        def addresses(tensor):
            return torch.tensor([tensor.data_ptr()], dtype=torch.uint64, device=DEVICE)

        places = torch.arange(count, device=DEVICE)
        kernels.store_rows(addresses(device), addresses(host), places, slots, row_bytes)
        torch.cuda.synchronize()
        before[slots.cpu()] = device.cpu()
        self.assertTrue(torch.equal(host, before))
        buffer.close()


class TestShortOfMemory(CustomTestCase):
    def test_refusal_names_setting_size_and_free(self):
        free = 50e9 + host_memory.HOST_RESERVE_BYTES
        with mock.patch.object(host_pool, "available_host_bytes", return_value=free):
            check_host_memory(int(50e9), 1, "host_ratio=1.0")
            with self.assertRaises(ValueError) as caught:
                check_host_memory(int(30e9), 2, "host_ratio=1.0")
        for word in (
            "--enable-decode-nsa-kv-offload",
            "host_ratio=1.0",
            "60.00 GB",
            "2 rank(s)",
            "50.00 GB",
            "--decode-nsa-kv-offload-config",
            '"host_size_gb": N',
            "at most 25.0",
            "--max-total-tokens",
        ):
            self.assertIn(word, str(caught.exception))

    def test_proposed_size_is_rounded_down(self):
        free = int(49.96e9) + host_memory.HOST_RESERVE_BYTES
        with mock.patch.object(host_pool, "available_host_bytes", return_value=free):
            with self.assertRaisesRegex(ValueError, r"at most 49\.9,"):
                check_host_memory(int(60e9), 1, "host_ratio=1.0")

    def test_nothing_free(self):
        with mock.patch.object(host_pool, "available_host_bytes", return_value=0):
            with self.assertRaisesRegex(ValueError, r"0\.00 GB are free"):
                check_host_memory(1, 1, "host_size_gb=1")


class TestCgroup(CustomTestCase):
    def available(self, *files, machine=100):
        """With the two pairs of (limit, usage) files; None where a file is missing."""
        with tempfile.TemporaryDirectory() as folder:
            pairs = []
            for number, pair in enumerate(files):
                paths = [str(Path(folder, f"{kind}{number}")) for kind in ("limit", "usage")]
                for path, text in zip(paths, pair):
                    if text is not None:
                        Path(path).write_text(text)
                pairs.append(tuple(paths))
            memory = SimpleNamespace(available=machine)
            with (
                mock.patch.object(host_memory, "_CGROUP_LIMITS", tuple(pairs)),
                mock.patch.object(host_memory.psutil, "virtual_memory", return_value=memory),
            ):
                return host_memory.available_host_bytes()

    def test_limits(self):
        self.assertEqual(self.available(("80\n", "30\n"), (None, None)), 50)
        self.assertEqual(self.available((None, None), ("70", "30")), 40)
        self.assertEqual(self.available(("max\n", "30\n"), (None, None)), 100)
        self.assertEqual(self.available(("900", "1"), (None, None)), 100)
        self.assertEqual(self.available(("30", "80"), (None, None)), 0)
        self.assertEqual(self.available((None, None), (None, None)), 100)
        self.assertEqual(self.available(("80", None), ("?", "?")), 100)
        self.assertEqual(self.available(("80", "20"), ("50", "20")), 30)

    def test_this_machine(self):
        self.assertGreater(host_memory.available_host_bytes(), 0)


class FakeDriver:
    """Registrations as CUDA keeps them; the one at index ``fails_at`` fails."""

    def __init__(self, fails_at=None):
        self.fails_at, self.calls, self.live, self.error = fails_at, [], {}, 0

    def cudaHostRegister(self, address, size, flags):
        if len(self.calls) == self.fails_at:
            self.error = 2
            return 2
        self.calls.append((address, size))
        self.live[address] = size
        return 0

    def cudaHostUnregister(self, address):
        del self.live[address]
        return 0

    def cudaGetLastError(self):
        error, self.error = self.error, 0
        return error


class FakeRuntime:
    """What ``cuda.bindings.runtime`` is asked for; the call of the name ``fails`` fails."""

    cudaMemAttachGlobal = 1
    cudaDeviceAttr = SimpleNamespace(cudaDevAttrConcurrentManagedAccess=89)
    cudaMemoryAdvise = SimpleNamespace(cudaMemAdviseSetPreferredLocation=3, cudaMemAdviseSetAccessedBy=5)
    cudaMemLocationType = SimpleNamespace(cudaMemLocationTypeHost=2, cudaMemLocationTypeDevice=1)
    cudaMemLocation = SimpleNamespace

    def __init__(self, fails=None, shares=1):
        self.fails, self.shares, self.live, self.advised, self.error = fails, shares, {}, [], 0

    def module(self):
        """As ``from cuda.bindings import runtime`` finds it."""
        bindings = ModuleType("cuda.bindings")
        bindings.runtime = self
        cuda = ModuleType("cuda")
        cuda.bindings = bindings
        return mock.patch.dict(sys.modules, {"cuda": cuda, "cuda.bindings": bindings})

    def cudaDeviceGetAttribute(self, attribute, device):
        return 0, self.shares if attribute == 89 else 0

    def cudaMallocManaged(self, nbytes, flags):
        if self.fails == "malloc":
            self.error = 2
            return 2, 0
        mapping = mmap.mmap(-1, nbytes)
        mapping.write(b"\x07" * nbytes)  # CUDA does not promise zeros
        address = ctypes.addressof(ctypes.c_char.from_buffer(mapping))
        self.live[address] = mapping
        return 0, address

    def cudaMemAdvise(self, address, nbytes, advice, location):
        if self.fails == advice:
            self.error = 1
            return (1,)
        if self.fails == f"raise {advice}":
            raise TypeError("another signature")
        self.advised.append((address, nbytes, advice, location.type, location.id))
        return (0,)

    def cudaFree(self, address):
        del self.live[address]
        return (0,)

    def cudaGetLastError(self):
        error, self.error = self.error, 0
        return (error,)


def resident(address, size):
    """Whether each page of ``[address, address + size)`` has memory behind it."""
    pages = (ctypes.c_ubyte * -(-size // mmap.PAGESIZE))()
    libc = ctypes.CDLL(None, use_errno=True)
    if size and libc.mincore(ctypes.c_void_p(address), ctypes.c_size_t(size), pages):
        raise OSError(ctypes.get_errno(), "mincore")
    return [bool(page & 1) for page in pages]


class TestRegistration(CustomTestCase):
    def pinned(self, driver, nbytes, chunk_bytes):
        patcher = mock.patch.object(torch.cuda, "cudart", return_value=driver)
        patcher.start()
        self.addCleanup(patcher.stop)
        return HostBuffer(nbytes, "pinned", chunk_bytes=chunk_bytes)

    def test_chunks_cover_the_buffer(self):
        driver = FakeDriver()
        buffer = self.pinned(driver, 10_000, 4096)
        base = buffer.tensor.data_ptr()
        self.assertEqual(
            driver.calls, [(base, 4096), (base + 4096, 4096), (base + 8192, 1808)]
        )
        self.assertEqual(buffer.tensor.numel(), 10_000)
        self.assertFalse(buffer.tensor.any())
        buffer.close()
        self.assertEqual(driver.live, {})
        buffer.close()

    def test_chunk_as_large_as_the_buffer(self):
        driver = FakeDriver()
        self.pinned(driver, 4096, 4096).close()
        self.assertEqual([size for _, size in driver.calls], [4096])

    def test_failure_rolls_back(self):
        for fails_at in range(3):
            with self.subTest(fails_at=fails_at):
                driver = FakeDriver(fails_at)
                with self.assertRaisesRegex(RuntimeError, "cudaHostRegister failed with code 2"):
                    self.pinned(driver, 10_000, 4096)
                self.assertEqual(len(driver.calls), fails_at)
                self.assertEqual(driver.live, {})
                self.assertEqual(driver.error, 0, "the next kernel launch would find it")

    def test_pages_are_touched_before_they_are_registered(self):
        """Each chunk is resident when it is registered; the next one is not yet."""
        page, chunk, nbytes = mmap.PAGESIZE, 8 * mmap.PAGESIZE, 20 * mmap.PAGESIZE
        end = []

        class Driver(FakeDriver):
            def cudaHostRegister(self, address, size, flags):
                end.append(end[-1] if end else address + nbytes)
                assert all(resident(address, size)), "left to the driver's one thread"
                left = end[-1] - address - size
                assert not any(resident(address + size, left)), "touched too early"
                return super().cudaHostRegister(address, size, flags)

        with mock.patch.object(host_memory, "TOUCH_PIECE_BYTES", 3 * page):
            self.pinned(Driver(), nbytes, chunk).close()
        self.assertEqual(len(end), 3)

    def test_threads_touch_at_the_same_time(self):
        touch, both = HostBuffer._touch, threading.Barrier(2, timeout=30)

        def meet(buffer, start, end):
            both.wait()  # broken, and so an error, where one thread does all
            return touch(buffer, start, end)

        page = mmap.PAGESIZE
        with (
            mock.patch.object(host_memory, "TOUCH_PIECE_BYTES", page),
            mock.patch.object(host_memory, "_touch_threads", return_value=2),
            mock.patch.object(HostBuffer, "_touch", meet),
        ):
            self.pinned(FakeDriver(), 4 * page, 4 * page).close()

    def test_progress(self):
        for shown in (False, True):
            for fails_at in (None, 1):
                driver, bar = FakeDriver(fails_at), mock.MagicMock()
                with (
                    mock.patch.object(host_memory, "tqdm", return_value=bar) as made,
                    mock.patch.object(host_memory, "TOUCH_PIECE_BYTES", 4096),
                    mock.patch.object(torch.cuda, "cudart", return_value=driver),
                ):
                    if fails_at is None:
                        HostBuffer(10_000, "pinned", chunk_bytes=8192, show_progress=shown).close()
                    else:
                        with self.assertRaises(RuntimeError):
                            HostBuffer(10_000, "pinned", chunk_bytes=8192, show_progress=shown)
                self.assertEqual(made.call_args.kwargs["total"], 10_000)
                self.assertEqual(made.call_args.kwargs["disable"], not shown)
                steps = [call.args[0] for call in bar.update.call_args_list]
                self.assertEqual(steps, [4096, 4096, 1808])
                bar.__exit__.assert_called_once()

    def test_threads_of_this_process(self):
        for cores, threads in ((1, 1), (3, 3), (96, host_memory.MAX_TOUCH_THREADS)):
            with mock.patch.object(os, "sched_getaffinity", return_value=range(cores)):
                self.assertEqual(host_memory._touch_threads(), threads)

    def test_unregistered_when_dropped_and_at_exit(self):
        driver = FakeDriver()
        buffer = self.pinned(driver, 4096, 4096)
        self.assertTrue(buffer._finalizer.atexit)
        del buffer
        gc.collect()
        self.assertEqual(driver.live, {})

    def test_closed_buffer_is_collected(self):
        import weakref

        buffer = HostBuffer(4096, "plain")
        alive = weakref.ref(buffer)
        buffer.close()
        del buffer
        gc.collect()
        self.assertIsNone(alive())

    def test_no_driver_is_asked_for_plain_memory(self):
        with mock.patch.object(torch.cuda, "cudart", side_effect=AssertionError):
            HostBuffer(4096, "plain").close()

    def test_unknown_kind(self):
        with self.assertRaisesRegex(ValueError, "memory='pined' is none of"):
            HostBuffer(4096, "pined")


class TestManaged(CustomTestCase):
    DEVICE = torch.device("cuda", 3)

    def managed(self, runtime, nbytes=3_000_000):
        with (
            runtime.module(),
            mock.patch.object(torch.cuda, "cudart", return_value=FakeDriver()),
        ):
            return HostBuffer(nbytes, "managed", self.DEVICE)

    def test_stays_on_the_host_and_is_mapped_before_it_is_touched(self):
        runtime, seen = FakeRuntime(), []
        touch = HostBuffer._touch

        def touch_after_advice(buffer, start, end):
            seen.append(len(runtime.advised))
            return touch(buffer, start, end)

        with mock.patch.object(HostBuffer, "_touch", touch_after_advice):
            buffer = self.managed(runtime)
        (address,) = runtime.live
        self.assertEqual(buffer.tensor.data_ptr(), address)
        self.assertEqual(buffer.tensor.numel(), 3_000_000)
        self.assertFalse(buffer.tensor.any())
        self.assertEqual(runtime.advised, [(address, 4 << 20, 3, 2, 0), (address, 4 << 20, 5, 1, 3)])
        self.assertEqual(seen, [2])
        self.assertTrue(all(resident(address, 3_000_000)))
        buffer.close()
        self.assertEqual(runtime.live, {})
        buffer.close()

    def test_lives_as_long_as_a_view(self):
        runtime = FakeRuntime()
        buffer = self.managed(runtime)
        self.assertTrue(buffer._finalizer.atexit)
        rows = buffer.tensor[:656].view(1, 656)
        del buffer
        gc.collect()
        self.assertEqual(len(runtime.live), 1)
        self.assertFalse(rows.any())
        del rows
        gc.collect()
        self.assertEqual(runtime.live, {})

    def test_not_inherited_by_a_fork(self):
        """The pages of the parent would be unmapped as well."""
        runtime = FakeRuntime()
        buffer = self.managed(runtime)
        address = buffer.tensor.data_ptr()
        child = os.fork()
        if child == 0:
            maps = Path("/proc/self/maps").read_text().splitlines()
            spans = [[int(end, 16) for end in line.split()[0].split("-")] for line in maps]
            os._exit(int(any(begin <= address < end for begin, end in spans)))
        self.assertEqual(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), 0)
        self.assertFalse(buffer.tensor.any())

    def test_failure_frees_and_names_the_recipe(self):
        for fails, call in (("malloc", "cudaMallocManaged"), (3, "cudaMemAdvise"), (5, "cudaMemAdvise")):
            with self.subTest(fails=fails):
                runtime = FakeRuntime(fails)
                recipe = 'lower host_size_gb.*"host_memory": "pinned"'
                with self.assertRaisesRegex(RuntimeError, f"{call} failed with code.*{recipe}"):
                    self.managed(runtime)
                self.assertEqual((runtime.live, runtime.error), ({}, 0))
        for fails, error in (("raise 5", TypeError), (None, KeyboardInterrupt)):
            runtime = FakeRuntime(fails)
            interrupted = mock.Mock(side_effect=KeyboardInterrupt)
            try:
                with mock.patch.object(HostBuffer, "_touch", interrupted):
                    self.managed(runtime)
            except error as kept:  # whoever keeps the error keeps the buffer too
                self.assertEqual(runtime.live, {}, kept)
            else:
                self.fail("no error")

    def test_kind(self):
        cpu = torch.device("cpu")
        with FakeRuntime().module():
            self.assertEqual(host_memory.memory_for(self.DEVICE, registered=False), "managed")
            self.assertEqual(host_memory.memory_for(self.DEVICE, registered=True), "pinned")
            self.assertEqual(host_memory.memory_for(self.DEVICE, True, "managed"), "managed")
            self.assertEqual(host_memory.memory_for(self.DEVICE, False, "pinned"), "pinned")
            self.assertEqual(host_memory.memory_for(cpu, False, "managed"), "plain")
        with FakeRuntime(shares=0).module(), self.assertLogs(host_memory.logger, "WARNING"):
            self.assertEqual(host_memory.memory_for(self.DEVICE, registered=False), "pinned")


if __name__ == "__main__":
    unittest.main()
