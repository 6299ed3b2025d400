"""The host pool of latent rows: layout, size, and what happens when memory is short."""

import ctypes
import gc
import mmap
import os
import re
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
from sglang.srt.mem_cache.sparsity.nsa_offload import host_limits, host_memory, host_pool
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
    def test_log_does_not_speak_of_the_hierarchical_cache(self):
        with self.assertNoLogs("sglang.srt.mem_cache.memory_pool_host", "INFO"):
            make_pool(*DTYPES[0][:2]).close()

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


# A container of cgroup v2 in a namespace of its own, limit 300 GB, after a checkpoint of 180 GB was read.
V2_STAT = """anon 21474836480
file 194347270144
kernel 1610612736
shmem 1073741824
file_mapped 402653184
file_dirty 536870912
file_writeback 0
inactive_anon 22548578304
active_anon 0
inactive_file 182536110080
active_file 10737418240
unevictable 0
slab_reclaimable 805306368
slab_unreclaimable 268435456
"""
# A container of cgroup v1: the group's own counts, then those with the groups below.
V1_STAT = """cache 107374182400
rss 10737418240
inactive_file 0
active_file 0
dirty 0
hierarchical_memory_limit 214748364800
total_cache 107374182400
total_rss 10737418240
total_dirty 1073741824
total_writeback 0
total_inactive_file 96636764160
total_active_file 9663676416
"""


class TestCgroup(CustomTestCase):
    def available(self, files, machine=10**15, groups="0::/\n"):
        """With control-group files by their paths under the mount."""
        with tempfile.TemporaryDirectory() as folder:
            mount, proc = Path(folder, "cgroup"), Path(folder, "proc")
            for path, text in {**files, "../proc/self/cgroup": groups}.items():
                place = (mount if not path.startswith("..") else proc) / path.removeprefix("../proc/")
                place.parent.mkdir(parents=True, exist_ok=True)
                place.write_text(text)
            memory = SimpleNamespace(available=machine)
            with (
                mock.patch.multiple(host_limits, _CGROUPS=mount, _PROC=proc),
                mock.patch.object(host_limits.psutil, "virtual_memory", return_value=memory),
            ):
                return host_limits.available_host_bytes()

    def v2(self, limit, usage, stat=V2_STAT, folder=""):
        names = ("memory.max", "memory.current", "memory.stat")
        return {f"{folder}{name}": f"{value}\n" for name, value in zip(names, (limit, usage, stat))}

    def test_page_cache_is_free(self):
        limit, usage = 300 * 10**9, 220 * 10**9
        cache = 182536110080 + 10737418240 + 805306368 - 536870912
        self.assertEqual(self.available(self.v2(limit, usage)), limit - usage + cache)
        files = {
            "memory/memory.limit_in_bytes": f"{200 << 30}\n",
            "memory/memory.usage_in_bytes": f"{112 << 30}\n",
            "memory/memory.stat": V1_STAT,
        }
        groups = "12:pids:/docker/4f\n5:cpu,cpuacct:/docker/4f\n4:memory:/docker/4f\n0::/system.slice\n"
        cache = 96636764160 + 9663676416 - 1073741824
        self.assertEqual(self.available(files, groups=groups), (88 << 30) + cache)

    def test_what_is_not_cache_is_not_free(self):
        self.assertEqual(self.available(self.v2(100, 60, "anon 60\nfile_dirty 9\n")), 40)
        self.assertEqual(self.available(self.v2(100, 60, "inactive_file 900\n")), 100)  # read at two moments
        self.assertEqual(self.available(self.v2(100, 130, "anon 130\n")), 0)

    def test_groups_above_count(self):
        """The limit of a pod, or of a slice, above the process's own group."""
        files = {
            **self.v2("max", 5, "", "kubepods/pod7/main/"),
            **self.v2(80, 30, "", "kubepods/pod7/"),
            **self.v2(500, 100, "", "kubepods/"),
        }
        self.assertEqual(self.available(files, groups="0::/kubepods/pod7/main\n"), 50)
        files.update(self.v2(120, 100, "", "kubepods/"))
        self.assertEqual(self.available(files, groups="0::/kubepods/pod7/main\n"), 20)

    def test_no_limit(self):
        self.assertEqual(self.available({}, machine=100), 100)
        self.assertEqual(self.available(self.v2("max", 30), machine=100), 100)
        self.assertEqual(self.available(self.v2("?", 30), machine=100), 100)
        self.assertEqual(self.available(self.v2(900, 1, ""), machine=100), 100)
        self.assertEqual(self.available(self.v2(80, 30, ""), machine=100, groups="nonsense"), 50)

    def test_this_machine(self):
        self.assertGreater(host_limits.available_host_bytes(), 0)

    def test_fragments(self):
        zones = (
            "Node 0, zone      DMA      0      0      0      0      0      0      0      0      1      1      2\n"
            "Node 0, zone   Normal  90000  80000  70000   1000      0      0      0      0      0      3      7\n"
        )
        with tempfile.TemporaryDirectory() as folder, mock.patch.object(host_limits, "_PROC", Path(folder)):
            self.assertIsNone(host_limits.free_huge_bytes())
            Path(folder, "buddyinfo").write_text(zones)
            self.assertEqual(host_limits.free_huge_bytes(), ((1 + 3) * 512 + (2 + 7) * 1024) * 4096)


class FakeDriver:
    """Registrations as CUDA keeps them; the one at index ``fails_at`` fails."""

    def __init__(self, fails_at=None):
        self.fails_at, self.calls, self.live, self.error, self.code = fails_at, [], {}, 0, 2

    def cudaHostRegister(self, address, size, flags):
        if len(self.calls) == self.fails_at:
            self.error = self.code
            return self.code
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


def spans(lines, address):
    """Whether the first line of a mapping's description spans an address."""
    begin, end = (int(part, 16) for part in lines.split(" ", 1)[0].split("-"))
    return begin <= address < end


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

    def test_private_memory_in_huge_pages(self):
        """Shared memory, mmap's default, gets no huge pages; a fork must not have a copy."""
        buffer = HostBuffer(8 << 20, "plain")
        address = buffer.tensor.data_ptr()
        maps = Path("/proc/self/smaps").read_text()
        lines = next(part for part in re.split(r"\n(?=[0-9a-f]+-[0-9a-f]+ )", maps) if spans(part, address)).splitlines()
        self.assertIn(" rw-p ", lines[0])
        flags = next(line for line in lines if line.startswith("VmFlags:")).split()
        self.assertIn("dc", flags)
        if Path("/sys/kernel/mm/transparent_hugepage").exists():
            self.assertIn("hg", flags)

    def test_what_cannot_be_registered(self):
        for code, words in ((801, ["confidential", '"host_memory": "managed"', "--enable-decode"]), (2, ["ulimit -l", "memlock=-1", "host_size_gb"])):
            driver = FakeDriver(1)
            driver.code = code
            with self.assertRaises(RuntimeError) as caught:
                self.pinned(driver, 10_000, 4096)
            for word in (*words, f"code {code}", "pinned host memory"):
                self.assertIn(word, str(caught.exception))
            self.assertEqual((driver.live, driver.error), ({}, 0))

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

    def kind(self, runtime=None, num_bytes=1 << 30, registered=False, asked=None, huge=1 << 50):
        """The kind of memory, and what is logged about it."""
        with (
            (runtime or FakeRuntime()).module(),
            mock.patch.object(host_memory, "free_huge_bytes", return_value=huge),
            self.assertLogs(host_memory.logger, "INFO") as logged,
        ):
            return host_memory.memory_for(self.DEVICE, num_bytes, registered, asked), "\n".join(logged.output)

    def test_kind(self):
        self.assertEqual(host_memory.memory_for(torch.device("cpu"), 1, False, "managed"), "plain")
        large = host_memory.MANAGED_MAX_BYTES + 1
        for expected, words, asked in (
            ("managed", ["read fastest", '{"host_memory": "pinned"}'], {}),
            ("pinned", ["has run up to", '{"host_memory": "managed"}'], {"num_bytes": large}),
            ("managed", ["as asked for"], {"num_bytes": large, "asked": "managed"}),
            ("pinned", ["network card"], {"registered": True}),
            ("managed", ["as asked for"], {"registered": True, "asked": "managed"}),
            ("pinned", ["as asked for"], {"asked": "pinned"}),
            ("pinned", ["cannot share managed memory"], {"runtime": FakeRuntime(shares=0)}),
        ):
            with self.subTest(**asked):
                memory, text = self.kind(**asked)
                self.assertEqual(memory, expected)
                for word in (*words, f"{asked.get('num_bytes', 1 << 30) / 1e9:.2f} GB of host memory are {expected}"):
                    self.assertIn(word, text)
                self.assertNotIn("WARNING", text)

    def test_fragments_are_warned_of(self):
        for huge, warned in ((1 << 29, True), (1 << 30, False), (None, False)):
            memory, text = self.kind(huge=huge)
            self.assertEqual((memory, "in fragments" in text), ("managed", warned))
        self.assertNotIn("in fragments", self.kind(huge=0, asked="pinned")[1])

    def test_no_managed_memory_to_be_had(self):
        """No package, an older one, and a driver that does not answer: pinned, and no error is left behind."""
        with mock.patch.dict(sys.modules, {"cuda": None, "cuda.bindings": None}):
            with self.assertLogs(host_memory.logger, "INFO") as logged:
                self.assertEqual(host_memory.memory_for(self.DEVICE, 1, False), "pinned")
            self.assertIn("cuda.bindings cannot be imported", logged.output[0])
        silent, older = FakeRuntime(), FakeRuntime()
        silent.cudaDeviceGetAttribute = lambda *args: setattr(silent, "error", 801) or (801, 0)
        older.cudaMemLocation = None
        memory, text = self.kind(silent)
        self.assertEqual((memory, silent.error), ("pinned", 0))
        self.assertIn("code 801", text)
        with mock.patch.object(FakeRuntime, "cudaMemLocation", create=True):
            del FakeRuntime.cudaMemLocation
            del older.cudaMemLocation
            self.assertIn("cuda-bindings 13", self.kind(older)[1])
            FakeRuntime.cudaMemLocation = SimpleNamespace


if __name__ == "__main__":
    unittest.main()
