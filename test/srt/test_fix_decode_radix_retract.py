"""A request resumed after retraction can be entered into the decode node's radix cache."""

import os
import unittest
from types import SimpleNamespace
from unittest import mock

import torch

if not torch.cuda.is_available():
    os.environ.setdefault("SGLANG_USE_CPU_ENGINE", "1")

from sglang.srt.disaggregation.decode import DecodePreallocQueue
from sglang.srt.mem_cache.radix_cache import RadixCache
from sglang.test.test_utils import CustomTestCase


def resume(tree_cache):
    """Resume one retracted request; returns it."""
    req = SimpleNamespace(rid="a", is_retracted=True, last_node=None, load_kv_cache=mock.Mock())
    queue = mock.Mock(spec=DecodePreallocQueue)
    queue.tree_cache = tree_cache
    queue.retracted_queue = [req]
    queue.req_to_token_pool = mock.Mock(**{"available_size.return_value": 1})
    queue.token_to_kv_pool_allocator = mock.Mock()
    queue._uses_swa_tail_prealloc.return_value = False
    queue._allocatable_token_budgets.return_value = 100
    queue._prealloc_required_tokens.return_value = (10, 10)
    resumed = DecodePreallocQueue.resume_retracted_reqs(queue)
    assert resumed == [req] and queue.retracted_queue == []
    return req


class TestDecodeRadixRetract(CustomTestCase):
    def test_a_resumed_request_holds_the_root(self):
        cache = RadixCache.create_simulated()
        req = resume(cache)
        cache.dec_lock_ref(req.last_node)  # as cache_unfinished_req does
        self.assertEqual(cache.protected_size(), 0)

    def test_a_cache_without_a_tree(self):
        self.assertIsNone(resume(object()).last_node)


if __name__ == "__main__":
    unittest.main()
