"""Tokens with --enable-decode-nsa-kv-offload equal those without, on the real scheduler.

Contexts are longer than the window, windows longer than the top-k, and outputs cross the
window's edge, in both KV dtypes and both event loops.
"""

import unittest
from contextlib import nullcontext
from types import SimpleNamespace
from unittest import mock

from harness import environment, offload  # before torch: it sets the environment
from harness.scheduler import InprocScheduler
from harness.stamps import Stamps
from tiny_model import TinySpec, write_checkpoint

import torch
from sglang.srt.layers.attention.nsa.nsa_offload_backend import NSAOffloadIndexerMetadata
from sglang.srt.layers.attention.nsa_backend import NSAIndexerMetadata
from sglang.srt.mem_cache.sparsity.nsa_offload import factory, host_memory
from sglang.srt.mem_cache.sparsity.nsa_offload.controller import SparseCacheController
from sglang.srt.mem_cache.sparsity.nsa_offload.coordinator import NSAOffloadCoordinator
from sglang.srt.mem_cache.sparsity.nsa_offload.device_pool import NSAOffloadTokenToKVPool
from sglang.srt.speculative.eagle_info import EagleVerifyInput
from sglang.test.test_utils import CustomTestCase

LENGTHS = (1, 63, 64, 65, 127, 128, 129, 300, 700)
NEW_TOKENS = 66
# What a layer does in a decode step, and in a prefill.
TURN = ("swap_begin", "load_begin", "set_mla_kv_buffer", "attention_begin", "load_end")
WRITE_OF_PREFILL = ("set_mla_kv_buffer", "attention_end")


class TestServing(CustomTestCase):
    @classmethod
    def setUpClass(cls):
        cls.model = environment.MODELS / "tiny"
        write_checkpoint(cls.model, TinySpec())
        cls.prompts = offload.prompts(LENGTHS)
        cls.expected = {}  # greedy tokens are those of either loop

    def serve(self, dtype, overlap, **more):
        with InprocScheduler(
            self.model, overlap=overlap, **offload.server_args(dtype), **more
        ) as engine:
            outputs = engine.run(self.prompts, NEW_TOKENS)
            counters = None
            if offload.coordinator(engine) is not None:
                offload.check_idle(engine)
                counters = offload.coordinator(engine).lru.counters.tolist()
        return outputs, counters

    def compare(self, dtype, overlap):
        if dtype not in self.expected:
            self.expected[dtype], _ = self.serve(dtype, overlap)
        outputs, counters = self.serve(dtype, overlap, **offload.offload_args())
        self.assertEqual(outputs, self.expected[dtype])
        for hits, ring_hits, misses in counters:
            self.assertGreater(hits, 0)
            self.assertGreater(ring_hits, 0)
            # More than the first fill of every window: rows were evicted and fetched again.
            self.assertGreater(misses, offload.WINDOW * len(LENGTHS))

    def test_bf16_normal_loop(self):
        self.compare("bfloat16", overlap=False)

    def test_bf16_overlap_loop(self):
        self.compare("bfloat16", overlap=True)

    def test_fp8_normal_loop(self):
        self.compare("fp8_e4m3", overlap=False)

    def test_fp8_overlap_loop(self):
        self.compare("fp8_e4m3", overlap=True)

    def test_multi_token_prediction(self):
        """The drafts of no offloading, refused ones included, and the tokens of no speculation."""
        model, steps = environment.MODELS / "tiny_draft", 2
        write_checkpoint(model, TinySpec(drafts=0.5))
        window = (steps + 1) * offload.TOP_K
        with InprocScheduler(model, overlap=True, **offload.server_args("fp8_e4m3")) as engine:
            wanted = engine.run(self.prompts[4:], NEW_TOKENS)
        drafts = {False: [], True: []}
        sample = EagleVerifyInput.sample
        for on, made in drafts.items():
            settings = {**offload.server_args("fp8_e4m3"), **offload.speculation_args(steps)}
            if on:
                settings.update(offload.offload_args(window))

            def recording(verify, *args, **kwargs):
                result = sample(verify, *args, **kwargs)
                made.append((verify.draft_token.tolist(), result[1].tolist()))
                return result

            with (
                mock.patch.object(EagleVerifyInput, "sample", recording),
                InprocScheduler(model, overlap=True, **settings) as engine,
            ):
                self.assertEqual(engine.run(self.prompts[4:], NEW_TOKENS), wanted)
                if on:
                    offload.check_idle(engine)
        self.assertEqual(drafts[True], drafts[False])
        accepted = [count for _, counts in drafts[True] for count in counts]
        self.assertEqual(set(accepted), {1, 2, 3})

    def run_in_turns(self, turn, topk_transform, model=None, **more):
        """Tokens with this method of the indexer's metadata.

        Raises:
            AssertionError: a layer did anything but its turn, or a prefill's write.
        """
        calls = []

        def recorded(owner, name, layer_of=lambda args: calls[-1][1]):
            real = getattr(owner, name)

            def method(*args, **kwargs):
                calls.append((name, layer_of(args)))
                return real(*args, **kwargs)

            return mock.patch.object(owner, name, method)

        with (
            recorded(NSAOffloadCoordinator, "swap_begin", lambda args: args[1]),
            recorded(SparseCacheController, "load_begin"),
            recorded(NSAOffloadTokenToKVPool, "set_mla_kv_buffer", lambda args: args[1].layer_id),
            recorded(NSAOffloadCoordinator, "attention_begin", lambda args: args[4].layer_id),
            recorded(SparseCacheController, "load_end"),
            recorded(NSAOffloadCoordinator, "attention_end", lambda args: args[2].layer_id),
            mock.patch.object(NSAOffloadIndexerMetadata, "topk_transform", topk_transform),
        ):
            settings = {**offload.server_args("bfloat16"), **offload.offload_args(), **more}
            with InprocScheduler(model or self.model, overlap=True, **settings) as engine:
                outputs = engine.run(self.prompts[4:], NEW_TOKENS)
        at, num_turns = 0, 0
        while at < len(calls):
            layer = calls[at][1]
            is_turn = calls[at : at + len(turn)] == [(name, layer) for name in turn]
            wanted = turn if is_turn else WRITE_OF_PREFILL
            self.assertEqual(calls[at : at + len(wanted)], [(name, layer) for name in wanted])
            at, num_turns = at + len(wanted), num_turns + is_turn
        self.assertGreater(num_turns, NEW_TOKENS // 3)
        return outputs

    def test_swap_begins_with_the_topk(self):
        """Once a layer; the new row is written meanwhile, once; then the rows are awaited. A layer without a top-k of its own begins later."""
        with InprocScheduler(self.model, overlap=True, **offload.server_args("bfloat16")) as engine:
            wanted = engine.run(self.prompts[4:], NEW_TOKENS)
        for metadata, turn in (
            (NSAOffloadIndexerMetadata, TURN),
            (NSAIndexerMetadata, ("set_mla_kv_buffer", "attention_begin", "swap_begin", "load_begin", "load_end")),
        ):
            with self.subTest(turn=turn):
                self.assertEqual(self.run_in_turns(turn, metadata.topk_transform), wanted)

    def test_swap_of_a_verify_step_begins_with_the_topk(self):
        model, steps = environment.MODELS / "tiny_draft", 2
        write_checkpoint(model, TinySpec(drafts=0.5))
        more = {**offload.speculation_args(steps), **offload.offload_args((steps + 1) * offload.TOP_K)}
        turn = (*TURN, "attention_end")  # the base runs it as an extend
        self.run_in_turns(turn, NSAOffloadIndexerMetadata.topk_transform, model, **more)

    def test_every_row_is_where_it_belongs(self):
        for dtype, overlap in (("bfloat16", True), ("fp8_e4m3", False)):
            with self.subTest(dtype=dtype), Stamps() as stamps, InprocScheduler(
                self.model, overlap=overlap, **offload.server_args(dtype), **offload.offload_args()
            ) as engine:
                for prompt in self.prompts:
                    engine.submit(prompt, 40)
                checked = 0
                while engine.unfinished():
                    engine.step()
                    checked += sum(stamps.check(engine))
                self.assertGreater(checked, 5000)
                engine.drain()
                offload.check_idle(engine)


class TestLayerSwap(CustomTestCase):
    """The coordinator alone: what it does in turn, and for which layer."""

    def setUp(self):
        self.turns = []
        self.coordinator = coordinator = NSAOffloadCoordinator.__new__(NSAOffloadCoordinator)
        vars(coordinator).update(start_layer=0, page_size=1, _swap=None)
        for part in ("controller", "inputs", "backend_adaptor", "req_to_token_pool"):
            setattr(coordinator, part, mock.MagicMock())
        coordinator.inputs.page_table = torch.zeros((2, 4), dtype=torch.int32)
        coordinator.controller.load_begin.side_effect = lambda: self.turn("load_begin") or nullcontext()
        coordinator.controller.load_end.side_effect = lambda: self.turn("load_end")
        adapt = coordinator.backend_adaptor.adapt_for_attn_metadata
        adapt.side_effect = lambda layer_id, out, selected_indices, **kwargs: self.turn(
            (layer_id, selected_indices[:, 0].tolist())
        )
        self.topk = torch.tensor([[1] * 4, [2] * 4, [-1] * 4], dtype=torch.int32)

    def turn(self, name):
        self.turns.append(name)

    def attention(self, layer_id, topk):
        layer = SimpleNamespace(layer_id=layer_id)
        return self.coordinator._handle_sparse_retrieve(None, layer, None, None, topk_indices=topk)

    def test_one_swap_for_a_layer(self):
        """Whatever SGLang makes of its top-k: padded, it is a new tensor."""
        for more in (0, 1):
            self.turns.clear()
            self.coordinator.swap_begin(0, self.topk[:2])
            page_table = self.attention(0, self.topk[: 2 + more].clone())
            self.assertEqual(self.turns, ["load_begin", (0, [1, 2]), "load_end"])
            self.assertIs(page_table, self.coordinator.inputs.page_table)

    def test_layer_that_takes_over_a_topk_swaps_at_its_attention(self):
        """Without the rows that SGLang has padded the top-k by."""
        self.coordinator.swap_begin(0, self.topk[:2])
        self.attention(0, self.topk)
        self.turns.clear()
        self.attention(1, self.topk)
        self.assertEqual(self.turns, ["load_begin", (1, [1, 2]), "load_end"])


class TestFactory(CustomTestCase):
    def attached(self, num_bytes=1 << 30, **settings):
        """The kind of memory that the host pool is made of, by a GPU that shares managed memory."""
        args = SimpleNamespace(disable_radix_cache=True, **settings)
        runner = mock.MagicMock(server_args=args)
        runner.token_to_kv_pool.device = "cuda"
        runner.token_to_kv_pool.size = runner.model_config.context_len = 64
        sizes = runner.token_to_kv_pool.sizes
        sizes.host_bytes_per_token = sizes.retraction_bytes = sizes.saved_bytes.return_value = 1
        config = SimpleNamespace(host_memory=None)
        with (
            mock.patch.object(factory.NSAKVOffloadConfig, "from_server_args", return_value=config),
            mock.patch.object(host_memory, "_no_managed_memory", return_value=None),
            mock.patch.object(factory, "NSAKVOnlyTokenToKVPoolHost") as pool,
            mock.patch.object(factory, "NSAOffloadCoordinator"),
            mock.patch.object(factory, "get_attention_tp_size", return_value=1),
            mock.patch.object(factory.logger, "info"),
        ):
            pool.rows_for.return_value = num_bytes
            factory.attach_nsa_kv_offload(runner)
        return pool.call_args.args[1]

    def test_managed_memory_up_to_the_size_that_has_run(self):
        alone = {"disaggregation_mode": "null", "disaggregation_transfer_backend": "mooncake"}
        for more, memory in ((0, "managed"), (1, "pinned")):
            self.assertEqual(self.attached(host_memory.MANAGED_MAX_BYTES + more, **alone), memory)

    def test_pool_that_a_transfer_engine_registers_is_pinned(self):
        self.assertEqual(self.attached(disaggregation_mode="null", disaggregation_transfer_backend="mooncake"), "managed")
        for backend, memory in (("mooncake", "pinned"), ("nixl", "pinned"), ("fake", "managed")):
            settings = {"disaggregation_mode": "decode", "disaggregation_transfer_backend": backend}
            self.assertEqual(self.attached(**settings), memory, backend)


if __name__ == "__main__":
    unittest.main()
