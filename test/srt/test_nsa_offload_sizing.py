"""The sizing of every buffer and table: the formula, and what a server makes of its memory budget."""

import dataclasses
import unittest
from types import SimpleNamespace
from unittest import mock

import nsa_offload_tools as tools  # first: chooses the device
import torch
from test_nsa_offload_pools import DTYPES, LAYERS, PAGE, SIZES, TOKENS, make_pool

from sglang.jit_kernel.nsa_kv_offload import MissQueue
from sglang.srt.mem_cache.memory_pool import NSATokenToKVPool
from sglang.srt.mem_cache.sparsity.nsa_offload import host_pool, sizing, staging
from sglang.srt.mem_cache.sparsity.nsa_offload.host_pool import NSAKVOnlyTokenToKVPoolHost
from sglang.srt.mem_cache.sparsity.nsa_offload.lru_cache import LRUCacheState
from sglang.srt.mem_cache.sparsity.nsa_offload.sizing import NSAOffloadPoolConfigurator
from sglang.test.test_utils import CustomTestCase

DEVICE = tools.DEVICE


def page_table_bytes(sizes):
    """Of the page table that layers share; test_nsa_offload_swap.py holds it against the tensor."""
    return sizes.num_windows * sizes.swap_entries * sizing.PAGE_TABLE_BYTES_PER_ENTRY


class TestSizes(CustomTestCase):
    def test_formula_equals_what_is_allocated(self):
        for spec in DTYPES:
            for windows in (2, 5):
                with self.subTest(spec=spec, windows=windows):
                    sizes = dataclasses.replace(SIZES, num_windows=windows, row_bytes=spec[2])
                    pool = make_pool(*spec, sizes=sizes)
                    lru = LRUCacheState(
                        LAYERS, windows, sizes.lru_slots, sizes.ring_slots, DEVICE
                    )
                    tables = staging.PrefillStaging(sizes, TOKENS // PAGE, DEVICE)
                    owned = [
                        tensor
                        for owner in (lru, tables)
                        for tensor in vars(owner).values()
                        if isinstance(tensor, torch.Tensor)
                    ]
                    owned += pool.kv_buffer + pool.index_k_with_scale_buffer
                    owned += MissQueue(windows, sizes.top_k, TOKENS + PAGE, DEVICE).tensors()
                    allocated = sum(tensor.nbytes for tensor in owned) + page_table_bytes(sizes)
                    # Not counted: counters, the words of the queue, and 8 bytes a page of 64 rows.
                    missing = allocated - sizes.device_bytes(TOKENS)
                    self.assertGreaterEqual(missing, 0)
                    self.assertLess(missing, 1024 + 16 * sizes.device_slots // PAGE)

    def test_a_draft_layer_and_several_queries_are_counted(self):
        spec = DTYPES[0]
        plain = dataclasses.replace(SIZES, row_bytes=spec[2])
        sizes = dataclasses.replace(plain, queries=3, draft_layers=1)
        more = []
        for s in (plain, sizes):
            queue = MissQueue(s.num_windows, s.swap_entries, TOKENS, DEVICE)
            more.append(sum(tensor.nbytes for tensor in queue.tensors()) + page_table_bytes(s))
        # The draft model's pool is SGLang's own, of one layer and as many slots.
        pool = NSATokenToKVPool(
            TOKENS,
            page_size=PAGE,
            dtype=spec[0],
            kv_lora_rank=512,
            qk_rope_head_dim=64,
            layer_num=1,
            device=DEVICE,
            index_head_dim=128,
            enable_memory_saver=False,
            kv_cache_dim=spec[1],
        )
        draft = sum(t.nbytes for t in pool.kv_buffer + pool.index_k_with_scale_buffer)
        self.assertEqual(
            sizes.device_bytes(TOKENS) - plain.device_bytes(TOKENS), more[1] - more[0] + draft
        )

    def test_one_more_window_and_token(self):
        more = dataclasses.replace(SIZES, num_windows=4)
        self.assertEqual(more.device_bytes(0) - SIZES.device_bytes(0), SIZES.window_bytes)
        self.assertEqual(SIZES.device_bytes(64) - SIZES.device_bytes(0), 64 * (132 * LAYERS + 4.125) + 4)


class TestConfigurator(CustomTestCase):
    def setUp(self):
        super().setUp()
        self.host_free = int(1e12)
        patcher = mock.patch.object(
            host_pool, "available_host_bytes", side_effect=lambda: self.host_free
        )
        patcher.start()
        self.addCleanup(patcher.stop)

    def configurator(self, config=None, **args):
        hf_config = SimpleNamespace(architectures=["DeepseekV32ForCausalLM"], index_topk=64)
        self.args = SimpleNamespace(
            decode_nsa_kv_offload_config=config,
            get_model_config=lambda: SimpleNamespace(hf_config=hf_config),
            tp_size=1,
            nnodes=1,
            dp_size=1,
            enable_dp_attention=False,
            disaggregation_mode="null",
            max_prefill_tokens=512,
            chunked_prefill_size=256,
            max_total_tokens=None,
            max_running_requests=8,
            speculative_algorithm=None,
            speculative_num_draft_tokens=None,
        )
        vars(self.args).update(args)
        runner = SimpleNamespace(
            server_args=self.args,
            page_size=PAGE,
            model_config=SimpleNamespace(context_len=1000, hf_config=hf_config),
            num_effective_layers=LAYERS,
            calculate_mla_kv_cache_dim=lambda: 656,
            kv_cache_dtype=torch.float8_e4m3fn,
        )
        return NSAOffloadPoolConfigurator(runner)

    def sized(self, gigabytes=0.1, config=None, **args):
        available = int(gigabytes * 1e9)
        result = self.configurator(config, **args).calculate_pool_sizes(available, PAGE)
        tokens, sizes = result.max_total_num_tokens, result.offload
        self.assertEqual(tokens % PAGE, 0)
        self.assertLessEqual(sizes.device_bytes(tokens), available)
        self.slot_limit = result.slot_limit
        return tokens, sizes

    def test_memory_is_used_to_the_last_page(self):
        tokens, sizes = self.sized()
        self.assertGreater(sizes.device_bytes(tokens + 2 * PAGE), 0.1e9)
        self.assertEqual(sizes.num_windows, 9)
        self.assertEqual((sizes.lru_slots, sizes.ring_slots), (128, 64))

    def test_speculation(self):
        """Windows hold the top-k of every query, rows of the draft layer stay on the device."""
        tokens, sizes = self.sized(
            speculative_algorithm="EAGLE", speculative_num_draft_tokens=4, max_running_requests=2
        )
        self.assertEqual((sizes.lru_slots, sizes.queries, sizes.swap_entries), (256, 4, 256))
        self.assertEqual(sizes.draft_layers, 1)
        self.assertGreater(sizes.device_bytes(tokens + 2 * PAGE), 0.1e9)

    def test_more_tokens_than_dense_at_equal_bytes(self):
        tokens, _ = self.sized(0.5)
        dense = int(0.5e9) // ((656 + 132) * LAYERS)
        self.assertGreater(tokens, 5 * dense)

    def test_staging_holds_a_chunked_prompt_and_the_batch_beside_it(self):
        """Whatever else it counts: the context, whole, and a chunk in pages of its own."""
        for chunk in (256, 2048):
            _, sizes = self.sized(chunked_prefill_size=chunk)
            self.assertGreaterEqual(sizes.staging_slots, 1000 + chunk)
            self.assertLessEqual(sizes.staging_slots, 1000 + max(chunk, 512) + 4 * PAGE)
            self.assertEqual(sizes.staging_slots % PAGE, 0)

    def test_staging_without_chunks(self):
        for chunk in (None, -1):
            _, sizes = self.sized(chunked_prefill_size=chunk, max_prefill_tokens=2000)
            self.assertGreaterEqual(sizes.staging_slots, 2000)
            _, sizes = self.sized(chunked_prefill_size=chunk, max_prefill_tokens=10)
            self.assertGreaterEqual(sizes.staging_slots, 1000)

    def test_a_decode_node_stages_nothing(self):
        self.assertEqual(self.sized(disaggregation_mode="decode")[1].staging_slots, 0)

    def test_derived_requests(self):
        _, sizes = self.sized(max_running_requests=None)
        derived = self.args.max_running_requests
        self.assertEqual(sizes.num_windows, derived + 1)
        per_request = sizes.window_bytes + 1000 * sizes.bytes_per_token
        spare = 0.1e9 - sizes.fixed_bytes - sizes.window_bytes - PAGE * 132 * LAYERS
        self.assertEqual(derived, int(spare // per_request))
        self.sized(50, max_running_requests=None)
        self.assertEqual(self.args.max_running_requests, sizing.MAX_DERIVED_REQUESTS)
        self.sized(max_running_requests=None, dp_size=2, enable_dp_attention=True)
        self.assertEqual(self.args.max_running_requests, 2 * derived)
        self.sized(max_running_requests=None, dp_size=2)  # SGLang's limit is each server's then
        self.assertEqual(self.args.max_running_requests, derived)

    def test_requests_are_shared_by_ranks_of_dp_attention_alone(self):
        """The servers that --dp-size makes without it admit as many each as the argument says."""
        self.assertEqual(self.sized(dp_size=2, enable_dp_attention=True)[1].num_windows, 5)
        self.assertEqual(self.sized(dp_size=2)[1].num_windows, 9)

    def test_token_limit(self):
        tokens, sizes = self.sized(max_total_tokens=500)
        self.assertEqual(tokens, 512)
        self.assertEqual(sizes.staging_slots, 8 * PAGE)

    def test_what_limits_the_slots(self):
        for limit, more in (
            ("device_memory", {}),
            ("device_memory", {"max_total_tokens": 10**9}),
            ("device_memory", {"config": '{"host_size_gb": 99}'}),
            ("max_total_tokens", {"max_total_tokens": 500}),
            ("max_total_tokens", {"max_total_tokens": 500, "config": '{"host_size_gb": 99}'}),
            ("host_memory", {"config": '{"host_size_gb": 0.03}'}),
            ("host_memory", {"config": '{"host_ratio": 0.5}'}),
            ("host_memory", {"max_total_tokens": 500, "config": '{"host_size_gb": 0.0006}'}),
        ):
            with self.subTest(limit=limit, **more):
                self.sized(**more)
                self.assertEqual(self.slot_limit, limit)

    def test_slots_that_fit_do_not_ask_the_machine(self):
        tokens, _ = self.sized()
        self.host_free = 0
        configurator = self.configurator()
        self.assertEqual(configurator.fit_slots(int(0.1e9)), tokens)
        self.assertEqual(configurator.sizes.num_windows, 9)

    def test_too_little_device_memory(self):
        with self.assertRaises(ValueError) as caught:
            self.sized(0.001)
        for word in ("--enable-decode-nsa-kv-offload", "0.00 GB are left", "window_size", "--context-length"):
            self.assertIn(word, str(caught.exception))
        with self.assertRaisesRegex(ValueError, "--mem-fraction-static, or lower window_size"):
            self.sized(0.0001, disaggregation_mode="decode")  # stages nothing

    def test_too_little_host_memory(self):
        self.host_free = sizing_reserve() + int(10e6)
        with self.assertRaises(ValueError) as caught:
            self.sized()
        for word in ("--enable-decode-nsa-kv-offload", "host_ratio=1.0", "0.01 GB are"):
            self.assertIn(word, str(caught.exception))
        with self.assertRaisesRegex(ValueError, "host_size_gb=0.05"):
            self.sized(config='{"host_size_gb": 0.05}')
        self.sized(config='{"host_size_gb": 0.009}')

    def test_ranks_of_a_host_count_together(self):
        self.host_free = sizing_reserve() + int(40e6)
        self.sized(config='{"host_size_gb": 0.03}')
        with self.assertRaisesRegex(ValueError, "2 rank"):
            self.sized(config='{"host_size_gb": 0.03}', tp_size=2)
        self.sized(config='{"host_size_gb": 0.03}', tp_size=2, nnodes=2)
        # A replica, which starts beside this one or has started and taken its part.
        with self.assertLogs(host_pool.logger, "WARNING") as logged:
            self.sized(config='{"host_size_gb": 0.03}', dp_size=2)
        self.assertIn("2 servers of --dp-size need 0.06 GB", logged.output[0])
        data_parallel = {"dp_size": 2, "enable_dp_attention": True}  # --tp-size counts these ranks
        self.sized(config='{"host_size_gb": 0.03}', tp_size=2, nnodes=2, **data_parallel)
        with self.assertRaisesRegex(ValueError, "2 rank"):
            self.sized(config='{"host_size_gb": 0.03}', tp_size=2, **data_parallel)

    def test_retracted_requests_of_a_decode_node(self):
        """A share of the pool that holds the longest request, or what was asked for; none elsewhere."""
        token = LAYERS * (656 + 132)
        for more, expected in (
            ({}, None),
            ({"max_total_tokens": 1500}, 1024 * token),  # a context of 1,000
            ({"max_total_tokens": 500}, 512 * token),
            ({"config": '{"retract_size_gb": 0.01}'}, int(0.01e9)),
            ({"config": '{"retract_size_gb": 0}'}, 0),
            ({"disaggregation_mode": "null"}, 0),
        ):
            with self.subTest(**more):
                tokens, sizes = self.sized(**{"disaggregation_mode": "decode", **more})
                if expected is None:
                    expected = int(0.05 * (tokens + PAGE) * LAYERS * 656)
                    self.assertGreater(expected, 1024 * token)
                self.assertEqual(sizes.retraction_bytes, expected)
        with self.assertRaisesRegex(ValueError, "retract_size_gb=1 has no use on a server that prefills"):
            self.sized(config='{"retract_size_gb": 1}')

    def test_retracted_requests_count_as_host_memory(self):
        self.host_free = sizing_reserve() + 2 * int(40e6)
        more = {"disaggregation_mode": "decode", "tp_size": 2}
        self.sized(config='{"host_size_gb": 0.03, "retract_size_gb": 0.01}', **more)
        with self.assertRaises(ValueError) as caught:
            self.sized(config='{"host_size_gb": 0.035, "retract_size_gb": 0.01}', **more)
        for words in ("0.09 GB of host memory (2 rank(s) on this host, 0.01 GB of each for retracted", "N at most 0.0"):
            self.assertIn(words, str(caught.exception))
        self.host_free = sizing_reserve() + int(80e9)
        with self.assertRaisesRegex(ValueError, "N at most 65.0"):
            self.sized(20, config='{"host_size_gb": 70, "retract_size_gb": 15}', disaggregation_mode="decode")

    def test_host_size(self):
        tokens, sizes = self.sized(config='{"host_size_gb": 0.03}')
        rows = NSAKVOnlyTokenToKVPoolHost.rows_for(tokens, PAGE)
        self.assertLessEqual(rows * sizes.host_bytes_per_token, 0.03e9)
        self.assertGreater((rows + PAGE) * sizes.host_bytes_per_token, 0.03e9)

    def test_host_size_above_need(self):
        self.assertEqual(self.sized(config='{"host_size_gb": 99}')[0], self.sized()[0])

    def test_host_size_that_answers_nothing(self):
        """The remedy holds one request of the context, and the warning's as well."""
        with self.assertRaisesRegex(ValueError, "host_size_gb=0.0001 holds 0 tokens") as caught:
            self.sized(config='{"host_size_gb": 0.0001}')
        with self.assertLogs(sizing.logger, "WARNING") as logged:
            self.assertLess(self.sized(config='{"host_size_gb": 0.0005}')[0], 1000)
        for text in (str(caught.exception).split("give ")[1], logged.output[0].split("give ")[1]):
            remedy = float(text.split()[0])
            with self.assertNoLogs(sizing.logger, "WARNING"):
                tokens = self.sized(config=f'{{"host_size_gb": {remedy}}}')[0]
            self.assertEqual(tokens, 1024 + PAGE)

    def test_requests_that_leave_no_room(self):
        """The remedy leaves room for one request of the context."""
        for more in ({}, {"dp_size": 2, "enable_dp_attention": True}):
            with self.assertRaisesRegex(ValueError, "--max-running-requests 4000 needs") as caught:
                self.sized(max_running_requests=4000, **more)
            remedy = int(str(caught.exception).split("lower it to ")[1].split()[0])
            self.assertGreaterEqual(self.sized(max_running_requests=remedy, **more)[0], 1024 + PAGE)
            with self.assertRaises((ValueError, AssertionError)):
                self.assertGreaterEqual(self.sized(max_running_requests=remedy + 2, **more)[0], 1024 + PAGE)

    def test_host_ratio(self):
        whole, half = self.sized()[0], self.sized(config='{"host_ratio": 0.5}')[0]
        self.assertEqual(half, whole // 2 // PAGE * PAGE)

    def test_host_pool_takes_what_was_checked(self):
        tokens, sizes = self.sized(0.01, config='{"host_size_gb": 0.003}', max_running_requests=2)
        pool = make_pool(*DTYPES[0], sizes=sizes, tokens=tokens)
        host = NSAKVOnlyTokenToKVPoolHost(pool, "managed" if DEVICE == "cuda" else "plain")
        self.addCleanup(host.close)
        self.assertEqual(host.size, NSAKVOnlyTokenToKVPoolHost.rows_for(tokens, PAGE))
        self.assertLessEqual(host.kv_buffer.nbytes, 0.003e9)


def sizing_reserve():
    return host_pool.HOST_RESERVE_BYTES


if __name__ == "__main__":
    unittest.main()
