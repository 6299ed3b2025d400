"""Retraction on a decode node copies a DSA request's rows to the CPU and back."""

import os
import unittest
from unittest import mock

import torch

if not torch.cuda.is_available():
    os.environ.setdefault("SGLANG_USE_CPU_ENGINE", "1")

from sglang.srt.mem_cache.allocator import PagedTokenToKVPoolAllocator
from sglang.srt.mem_cache.memory_pool import NSATokenToKVPool
from sglang.test.test_utils import CustomTestCase

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
PAGE, LAYERS, PAGES = 64, 2, 8


class TestNSACPUCopy(CustomTestCase):
    def setUp(self):
        if DEVICE == "cpu":
            patcher = mock.patch.object(torch.cuda, "synchronize")
            patcher.start()
            self.addCleanup(patcher.stop)

    def test_rows_and_index_keys_move_to_other_slots(self):
        for dtype, dim in ((torch.float8_e4m3fn, 656), (torch.bfloat16, 576)):
            with self.subTest(dtype=dtype):
                self.check_round_trip(dtype, dim)

    def check_round_trip(self, dtype, dim):
        pool = NSATokenToKVPool(
            PAGES * PAGE,
            page_size=PAGE,
            dtype=dtype,
            kv_lora_rank=512,
            qk_rope_head_dim=64,
            layer_num=LAYERS,
            device=DEVICE,
            index_head_dim=128,
            enable_memory_saver=False,
            kv_cache_dim=dim,
        )
        allocator = PagedTokenToKVPoolAllocator(
            PAGES * PAGE, page_size=PAGE, dtype=dtype, device=DEVICE, kvcache=pool, need_sort=False
        )
        buffers = pool.kv_buffer + pool.index_k_with_scale_buffer
        for buffer in buffers:
            buffer.view(torch.uint8).random_(0, 256)
        before = [buffer.clone() for buffer in buffers]

        # Three pages, the last one ragged, out of order; then two others and one again.
        length = 2 * PAGE + 10
        old, new = (self.slots(pages)[:length] for pages in ((5, 2, 7), (1, 5, 3)))
        saved = allocator.get_cpu_copy(old)
        for buffer in buffers:
            buffer.zero_()
        allocator.load_cpu_copy(saved, new)

        for layer in range(LAYERS):
            rows, keys = pool.kv_buffer[layer], pool.index_k_with_scale_buffer[layer]
            expected = before[layer].view(torch.uint8)[old]
            self.assertTrue(torch.equal(rows.view(torch.uint8)[new], expected))
            expected = before[LAYERS + layer][[5, 2, 7]]
            self.assertTrue(torch.equal(keys[[1, 5, 3]], expected))
            self.assertFalse(rows.view(torch.uint8)[self.slots((2, 4, 6))].any())
            self.assertFalse(keys[[0, 2, 4, 6]].any())

    def slots(self, pages):
        first = torch.tensor(pages, device=DEVICE)[:, None] * PAGE
        return (first + torch.arange(PAGE, device=DEVICE)).flatten()


if __name__ == "__main__":
    unittest.main()
