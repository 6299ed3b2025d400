"""Device windows and prefill staging."""

import dataclasses
import unittest
from unittest import mock

import nsa_offload_tools as tools  # first: chooses the device
import torch

from sglang.srt.mem_cache.memory_pool import CPUCopyRefused
from sglang.srt.mem_cache.sparsity.nsa_offload import staging
from sglang.srt.mem_cache.sparsity.nsa_offload.device_pool import NSAOffloadTokenToKVPool
from sglang.srt.mem_cache.sparsity.nsa_offload.host_pool import NSAKVOnlyTokenToKVPoolHost
from sglang.srt.mem_cache.sparsity.nsa_offload.sizing import OffloadSizes
from sglang.srt.mem_cache.sparsity.nsa_offload.window_allocator import SparseSlotAllocator
from sglang.test.test_utils import CustomTestCase

DEVICE = tools.DEVICE
PAGE, LAYERS, TOKENS = 64, 3, 1024
DTYPES = ((torch.float8_e4m3fn, 656, 656), (torch.bfloat16, 576, 1152))  # dtype, dim, row bytes
SIZES = OffloadSizes(
    num_windows=3,
    window_slots=192,
    lru_slots=128,
    staging_slots=8 * PAGE,
    num_layers=LAYERS,
    row_bytes=656,
    page_size=PAGE,
    top_k=16,
)


def make_pool(dtype, dim, row_bytes, sizes=SIZES, tokens=TOKENS):
    return NSAOffloadTokenToKVPool(
        tokens,
        page_size=PAGE,
        dtype=dtype,
        kv_lora_rank=512,
        qk_rope_head_dim=64,
        layer_num=sizes.num_layers,
        device=DEVICE,
        index_head_dim=128,
        enable_memory_saver=False,
        kv_cache_dim=dim,
        sizes=dataclasses.replace(sizes, row_bytes=row_bytes),
    )


class TestDevicePool(CustomTestCase):
    def test_spaces(self):
        for spec in DTYPES:
            with self.subTest(spec=spec):
                pool = make_pool(*spec)
                self.assertEqual(pool.size, TOKENS)
                self.assertEqual(len(pool.kv_buffer), LAYERS)
                for rows, keys in zip(pool.kv_buffer, pool.index_k_with_scale_buffer):
                    self.assertEqual(rows.shape, (SIZES.device_slots, 1, spec[1]))
                    self.assertEqual(rows[0].nbytes, spec[2])
                    self.assertEqual(keys.shape, (TOKENS // PAGE + 1, PAGE * 132))
                    self.assertFalse(rows.view(torch.uint8).any())
                self.assertEqual(pool.data_ptrs.tolist(), [b.data_ptr() for b in pool.kv_buffer])
                self.assertEqual(SIZES.device_slots % PAGE, 0)

    def test_rows_are_written_to_device_slots(self):
        # bf16 rows through the base's writer, caught at the border
        pool = make_pool(*DTYPES[1])
        base = NSAOffloadTokenToKVPool.__mro__[1]
        loc = torch.tensor([900, 901], device=DEVICE)
        with mock.patch.object(base, "set_mla_kv_buffer") as write:
            with self.assertRaisesRegex(RuntimeError, "outside a prepared forward"):
                pool.set_mla_kv_buffer(None, loc, None, None)
            pool.write_slots = torch.tensor([70], device=DEVICE)
            with self.assertRaisesRegex(RuntimeError, "outside a prepared forward"):
                pool.set_mla_kv_buffer(None, loc, None, None)
            pool.write_slots = torch.tensor([70, 71], device=DEVICE)
            pool.set_mla_kv_buffer("layer", loc, "nope", "rope")
        write.assert_called_once_with("layer", pool.write_slots, "nope", "rope")

    def test_access_by_host_slot_is_refused(self):
        pool = make_pool(*DTYPES[0])
        with self.assertRaises(NotImplementedError):
            pool.set_kv_buffer(None, None, None, None)
        with self.assertRaises(NotImplementedError):
            pool.get_mla_kv_buffer(None, None)

    def test_cpu_copy_moves_rows_and_index_keys(self):
        for spec in DTYPES:
            with self.subTest(spec=spec):
                sizes = dataclasses.replace(SIZES, row_bytes=spec[2], retraction_bytes=1 << 20)
                pool = make_pool(*spec, sizes=sizes)
                pool.host_pool = host = NSAKVOnlyTokenToKVPoolHost(pool, "managed" if DEVICE == "cuda" else "plain")
                self.addCleanup(host.close)
                self.assertEqual(
                    pool.get_contiguous_buf_infos(), host.get_contiguous_buf_infos()
                )
                rows = host.kv_buffer.view(torch.uint8)
                rows.random_(0, 256)
                for keys in pool.index_k_with_scale_buffer:
                    keys.random_(0, 256)
                before = rows.clone()
                keys_before = [keys.clone() for keys in pool.index_k_with_scale_buffer]
                length = PAGE + 9
                old, new = (
                    torch.cat([torch.arange(PAGE) + page * PAGE for page in pages])[:length]
                    for pages in ((5, 2), (9, 4))
                )
                saved = pool.get_cpu_copy(old.to(DEVICE))
                rows[:, old] = 0
                pool.load_cpu_copy(saved, new.to(DEVICE), mamba_indices=None)
                expected = before.clone()
                expected[:, old] = 0
                for source, target in ((5, 9), (2, 4)):
                    of_page = [slice(page * PAGE, (page + 1) * PAGE) for page in (source, target)]
                    expected[:, of_page[1]] = before[:, of_page[0]]
                self.assertTrue(torch.equal(rows, expected))
                for keys, was in zip(pool.index_k_with_scale_buffer, keys_before):
                    expected = was.clone()
                    expected[[9, 4]] = was[[5, 2]]
                    self.assertTrue(torch.equal(keys, expected))

    def test_cpu_copies_end_where_their_memory_does(self):
        for spec in DTYPES:
            with self.subTest(spec=spec):
                sizes = dataclasses.replace(SIZES, row_bytes=spec[2])
                two_pages = sizes.saved_bytes(PAGE + 1)
                self.assertEqual(two_pages, 2 * PAGE * LAYERS * (spec[2] + 132))
                sizes = dataclasses.replace(sizes, retraction_bytes=2 * two_pages - 1)
                pool = make_pool(*spec, sizes=sizes)
                pool.host_pool = host = NSAKVOnlyTokenToKVPoolHost(pool, "managed" if DEVICE == "cuda" else "plain")
                self.addCleanup(host.close)
                slots = torch.arange(PAGE, PAGE + PAGE + 9, device=DEVICE)
                saved = pool.get_cpu_copy(slots)
                buffers = [saved.rows, *saved.index_keys]
                self.assertEqual(sum(buffer.nbytes for buffer in buffers), pool.retraction.used)
                with mock.patch.object(pool, "_synchronize") as synchronize:
                    with self.assertRaisesRegex(CPUCopyRefused, "73 tokens take .* retract_size_gb"):
                        pool.get_cpu_copy(slots)
                synchronize.assert_not_called()
                one = pool.get_cpu_copy(slots[:PAGE])
                self.assertEqual(pool.retraction.used, two_pages * 3 // 2)
                del saved
                self.assertEqual(pool.retraction.used, two_pages // 2)
                saved = pool.get_cpu_copy(slots)
                del saved, one
                self.assertEqual(pool.retraction.used, 0)


class TestWindows(CustomTestCase):
    def test_disjoint_and_inside_their_area(self):
        allocator = SparseSlotAllocator(SIZES)
        windows = [allocator.alloc_contiguous() for _ in range(3)]
        slots = set()
        for window in windows:
            run = range(window.first_slot, window.first_slot + SIZES.window_slots)
            self.assertTrue(slots.isdisjoint(run))
            slots.update(run)
            self.assertEqual(
                window.first_slot, SIZES.first_window_slot + window.index * SIZES.window_slots
            )
        self.assertEqual(slots, set(range(PAGE, SIZES.first_staging_slot)))

    def test_exhaustion_and_double_free(self):
        allocator = SparseSlotAllocator(SIZES)
        windows = [allocator.alloc_contiguous() for _ in range(3)]
        with self.assertRaisesRegex(RuntimeError, "all 3 are owned.*--max-running-requests"):
            allocator.alloc_contiguous()
        allocator.free(windows[1])
        with self.assertRaisesRegex(RuntimeError, "Window 1 is freed twice"):
            allocator.free(windows[1])
        self.assertEqual(allocator.num_free, 1)
        self.assertEqual(allocator.alloc_contiguous(), windows[1])


class Prompts:
    """Request rows with host pages, over one PrefillStaging of 8 pages."""

    def __init__(self, module=staging):
        self.staging = module.PrefillStaging(SIZES, TOKENS // PAGE, DEVICE)
        self.req_to_token = torch.zeros((8, 512), dtype=torch.int32, device=DEVICE)

    def write(self, row, pages):
        for number, page in enumerate(pages):
            slots = torch.arange(PAGE, dtype=torch.int32, device=DEVICE) + page * PAGE
            self.req_to_token[row, number * PAGE : (number + 1) * PAGE] = slots

    def stage(self, row, prefix, length, last):
        self.staging.stage(row, prefix, length, last)

    def forward(self):
        self.staging.apply_pending(self.req_to_token)

    def slots(self, row, length):
        return self.staging.device_slots(self.req_to_token[row, :length]).tolist()

    def staged_host_pages(self):
        return self.staging.device_page_of_host_page.nonzero().flatten().tolist()


class TestStaging(CustomTestCase):
    first, end = SIZES.first_staging_slot, SIZES.device_slots

    def check_slots(self, prompts, row, length):
        slots = prompts.slots(row, length)
        self.assertEqual(len(set(slots)), length)
        self.assertTrue(all(self.first <= slot < self.end for slot in slots))
        return slots

    def test_one_prompt(self):
        prompts = Prompts()
        prompts.write(2, [5, 3])
        prompts.stage(2, 0, 100, last=True)
        prompts.forward()
        self.check_slots(prompts, 2, 100)
        self.assertEqual(prompts.staged_host_pages(), [3, 5])
        self.assertEqual(set(prompts.staging._pages_of_row), {2})
        prompts.staging.recycle()
        prompts.forward()
        self.assertEqual(prompts.staged_host_pages(), [])
        self.assertEqual(prompts.staging.num_free, 8)

    def test_padding_maps_to_padding(self):
        slots = torch.tensor([0, 0, 5], dtype=torch.int64, device=DEVICE)
        mapped = Prompts().staging.device_slots(slots)
        self.assertEqual(mapped.tolist(), [0, 0, 5])
        self.assertEqual(mapped.dtype, torch.int64)

    def test_chunks_keep_what_was_staged(self):
        prompts = Prompts()
        prompts.write(1, [4, 9, 2, 7])
        seen = []
        for prefix, length in ((0, 70), (70, 128), (128, 250)):
            prompts.staging.recycle()
            prompts.stage(1, prefix, length, last=length == 250)
            prompts.forward()
            slots = self.check_slots(prompts, 1, length)
            self.assertEqual(slots[: len(seen)], seen)
            seen = slots

    def test_many_prefill_batches_without_a_decode(self):
        prompts = Prompts()
        for batch in range(20):
            prompts.staging.recycle()
            rows = (batch % 8, (batch + 3) % 8)
            for number, row in enumerate(rows):
                first = 1 + (batch * 5 + number * 3) % 12
                prompts.write(row, [first, first + 1, first + 2])
                prompts.stage(row, 0, 150 + batch, last=True)
            prompts.forward()
            both = [slot for row in rows for slot in self.check_slots(prompts, row, 150 + batch)]
            self.assertEqual(len(set(both)), len(both))
            self.assertEqual(len(prompts.staged_host_pages()), 6)

    def test_chunked_prompt_beside_short_ones(self):
        prompts = Prompts()
        prompts.write(0, [1, 2, 3, 4])
        prompts.stage(0, 0, 64, last=False)
        prompts.forward()
        kept = prompts.slots(0, 64)
        for chunk in (1, 2, 3):
            prompts.staging.recycle()
            prompts.write(1, [10, 11])
            prompts.stage(0, chunk * 64, chunk * 64 + 64, last=chunk == 3)
            prompts.stage(1, 0, 128, last=True)
            prompts.forward()
            long = self.check_slots(prompts, 0, chunk * 64 + 64)
            self.assertEqual(long[:64], kept)
            self.assertTrue(set(long).isdisjoint(prompts.slots(1, 128)))

    def test_abort_in_the_middle_of_a_chunked_prompt(self):
        prompts = Prompts()
        prompts.write(3, [6, 8, 1])
        prompts.stage(3, 0, 128, last=False)
        prompts.forward()
        prompts.staging.release(3)
        prompts.staging.release(3)
        prompts.forward()
        self.assertEqual(prompts.staged_host_pages(), [])
        self.assertEqual(prompts.staging.num_free, 8)

    def test_abort_before_the_forward(self):
        prompts = Prompts()
        prompts.write(3, [6, 8])
        prompts.stage(3, 0, 128, last=True)
        prompts.staging.release(3)
        prompts.forward()
        prompts.staging.recycle()
        self.assertEqual(prompts.staged_host_pages(), [])
        self.assertEqual(prompts.staging.num_free, 8)

    def test_released_pages_in_the_same_forward(self):
        """A row, and its host pages, that get a new owner before the table is brought up to date."""
        prompts = Prompts()
        prompts.write(0, [1, 2])
        prompts.stage(0, 0, 128, last=False)
        prompts.forward()
        prompts.staging.release(0)
        prompts.write(0, [2, 3])
        prompts.stage(0, 0, 128, last=True)
        prompts.forward()
        self.assertEqual(prompts.staged_host_pages(), [2, 3])
        self.check_slots(prompts, 0, 128)

    def test_exhaustion(self):
        prompts = Prompts()
        prompts.stage(0, 0, 7 * PAGE, last=True)
        with self.assertRaisesRegex(RuntimeError, "2 pages needed, 1 of 8 free"):
            prompts.stage(1, 0, PAGE + 1, last=True)

    def test_prefix_that_is_not_staged(self):
        prompts = Prompts()
        prompts.stage(0, 0, 64, last=False)
        with self.assertRaisesRegex(RuntimeError, "prefix of 65 tokens, but only 64 are staged"):
            prompts.stage(0, 65, 100, last=True)

    FAULTS = {
        "former owner's mapping stays": ("self.device_page_of_host_page.index_fill_(0, host_pages, 0)", "pass"),
        "released before it is assigned": ("self._assignments = [a for a in self._assignments if a.row != row]", "pass"),
        "page given twice": ("self._free.pop() for", "self._free[-1] for"),
        "never recycled": ("self._finished_rows.append(row)", "pass"),
        "released twice": ("self._pages_of_row.pop(row, [])", "self._pages_of_row.get(row, [])"),
        "later chunks over the first": ("positions += [(first_page + i)", "positions += [(0 + i)"),
        "page for slot": ("pages * self.page_size + host_slots % self.page_size", "pages + host_slots % self.page_size"),
        "host slots for device slots": ("pages = self.device_page_of_host_page[(host_slots // self.page_size).long()]", "pages = host_slots // self.page_size"),
    }  # fmt: skip

    def test_faults_are_seen(self):
        names = (
            "test_one_prompt",
            "test_chunks_keep_what_was_staged",
            "test_abort_in_the_middle_of_a_chunked_prompt",
            "test_abort_before_the_forward",
            "test_released_pages_in_the_same_forward",
        )
        for name, (old, new) in self.FAULTS.items():
            with self.subTest(name):
                faulty = tools.mutated(staging, old, new)
                with (
                    mock.patch.object(Prompts.__init__, "__defaults__", (faulty,)),
                    self.assertRaises((AssertionError, RuntimeError, IndexError)),
                ):
                    for test in names:
                        getattr(self, test)()


if __name__ == "__main__":
    unittest.main()
