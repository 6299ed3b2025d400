"""Batches that SGLang pads, and forwards of idle ranks, on one rank that is told how many tokens others have.

Tokens are those without padding, and an idle forward leaves no trace.
"""

import contextlib
from unittest import mock

import pytest
import torch
from harness import mlp_sync, offload
from harness.scheduler import InprocScheduler

from sglang.srt.mem_cache.sparsity.nsa_offload.controller import SparseCacheController
from sglang.srt.mem_cache.sparsity.nsa_offload.coordinator import NSAOffloadCoordinator

LENGTHS = (70, 200, 300)
NEW_TOKENS = 12


def engine_of(model, steps, dtype="bfloat16", overlap=None, **more):
    args = {**offload.server_args(dtype), **offload.offload_args((steps + 1) * offload.TOP_K * 2)}
    overlap = bool(steps) if overlap is None else overlap
    return InprocScheduler(
        model, overlap=overlap, max_running_requests=6, **args, **offload.speculation_args(steps), **more
    )


def serve(engine, padding, steps, seen=None):
    """Tokens where every batch is padded by ``padding`` requests."""
    with mlp_sync.padded(lambda batch: padding, steps + 1, seen):
        return engine.run(offload.prompts(LENGTHS), NEW_TOKENS)


@pytest.mark.parametrize("steps", [0, 1, 3])
@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("dtype", ["bfloat16", "fp8_e4m3"])
def test_padded_batches(request, dtype, overlap, steps):
    if steps and not overlap:
        pytest.skip("speculation needs the overlapped loop")
    model = request.getfixturevalue("draft_model" if steps else "tiny_model")
    with engine_of(model, steps, dtype, overlap) as engine:
        stored = [offload.coordinator(engine).controller.rows_stored]
        plain, seen = serve(engine, 0, steps), []
        stored.append(offload.coordinator(engine).controller.rows_stored)
        assert serve(engine, 3, steps, seen) == plain
        stored.append(offload.coordinator(engine).controller.rows_stored)
        assert stored[2] - stored[1] == stored[1] - stored[0], "padding was stored, or rows were not"
        assert set(seen) == {"EXTEND", "TARGET_VERIFY" if steps else "DECODE"}
        offload.check_idle(engine)


def test_batch_padded_beyond_the_windows(tiny_model, monkeypatch):
    """As many requests as have windows, padded to a multiple of the attention ranks."""
    from sglang.srt.mem_cache.sparsity.nsa_offload import factory

    prompts = offload.prompts([70] * 6)
    monkeypatch.setattr(factory, "get_attention_tp_size", lambda: 8)
    with engine_of(tiny_model, 0) as engine:
        plain = engine.run(prompts, NEW_TOKENS)
        with mlp_sync.padded(lambda batch: -len(batch.seq_lens) % 8 if batch.forward_mode.is_decode() else 0):
            assert engine.run(prompts, NEW_TOKENS) == plain


def test_verify_tokens_that_are_no_multiple_of_the_drafts(draft_model):
    """Eight ranks pad the two tokens of one request's verify step to eight, three requests' six as well."""
    with engine_of(draft_model, 1) as engine:
        prompts = offload.prompts(LENGTHS)
        plain = engine.run(prompts, NEW_TOKENS)
        with tokens_padded_by(1):
            assert engine.run(prompts, NEW_TOKENS) == plain


@contextlib.contextmanager
def tokens_padded_by(tokens):
    """One token more than the queries of whole requests."""
    name = mlp_sync._name_tokens
    with (
        mock.patch.object(mlp_sync, "_name_tokens", lambda batch, n: name(batch, n - 2 + tokens)),
        mlp_sync.padded(lambda batch: int(batch.forward_mode.is_target_verify()), 2),
    ):
        yield


@pytest.mark.parametrize("overlap", [False, True])
def test_idle_forwards_between_steps(tiny_model, overlap):
    """No swap begins that no attention joins; tables and tokens stay."""
    with engine_of(tiny_model, 0, overlap=overlap) as engine:
        plain = engine.run(offload.prompts(LENGTHS), NEW_TOKENS)
        coordinator = offload.coordinator(engine)
        begun, joined = mock.Mock(return_value=contextlib.nullcontext()), mock.Mock()
        rids = [engine.submit(ids, NEW_TOKENS) for ids in offload.prompts(LENGTHS)]
        while engine.unfinished():
            engine.step()
            changes = coordinator._released or coordinator._admitted_rows  # an idle forward applies them, as any
            before = tables(coordinator)
            with (
                mock.patch.object(SparseCacheController, "load_begin", begun),
                mock.patch.object(SparseCacheController, "load_end", joined),
            ):
                mlp_sync.idle_forward(engine, 4)
            if not changes:
                assert all(map(torch.equal, before, tables(coordinator)))
        assert not begun.called and not joined.called and coordinator._swap is None
        assert [engine.outputs[rid] for rid in rids] == plain


def tables(coordinator):
    lru = coordinator.lru
    return [lru.position_at_offset.clone(), lru.last_used.clone(), *(kv.clone() for kv in coordinator.token_to_kv_pool.kv_buffer)]


def test_replay_without_a_request(tiny_model):
    """What a graph's replay of an idle rank sets and runs: nothing is real."""
    from sglang.srt.model_executor.forward_batch_info import ForwardMode

    with engine_of(tiny_model, 0) as engine:
        coordinator = offload.coordinator(engine)
        rid = engine.submit(offload.prompts([300])[0], 40)
        engine.step_until(lambda: len(engine.outputs[rid]) > 3)
        before = tables(coordinator)
        rows = torch.tensor([coordinator.req_to_token_pool.req_to_token.shape[0] - 1] * 4)
        stale = torch.tensor(list(coordinator._leases) * 4)[:4]
        for rows in (stale, rows):
            coordinator.decode_begin(4, 0, rows, torch.ones(4, dtype=torch.int64), ForwardMode.DECODE)
            assert coordinator.inputs.windows.tolist() == [-1] * 4
            assert not coordinator.inputs.write_slots.any()
            topk = torch.arange(4 * offload.TOP_K, dtype=torch.int32).view(4, -1) % 200
            coordinator.swap_begin(0, topk)
            coordinator._swap = None
            assert not coordinator.inputs.page_table.any()
        assert all(map(torch.equal, before, tables(coordinator)))
        engine.abort(all_requests=True)


def test_decode_batch_that_comes_as_a_prefill_is_refused(tiny_model):
    """SGLang turns decode into extend where it pads to the longest rank beside a prefill: never with several ranks."""
    from sglang.srt.model_executor.forward_batch_info import ForwardBatch

    init_new = ForwardBatch.init_new.__func__

    def beside_a_prefill(cls, batch, runner):
        if batch.forward_mode.is_decode():
            mlp_sync._name_tokens(batch, len(batch.input_ids))
            batch.is_extend_in_batch = True
        return init_new(cls, batch, runner)

    with engine_of(tiny_model, 0) as engine, mlp_sync.pinned_where_there_is_a_gpu():
        engine.submit(offload.prompts([100])[0], 4)
        with mock.patch.object(ForwardBatch, "init_new", classmethod(beside_a_prefill)):
            with pytest.raises(RuntimeError, match="DECODE batch came as EXTEND"):
                engine.drain()


FAULTS = {
    "padded top-k begins a second swap": "second_swap",
    "write slots without the padding": "write_slots",
    "an idle forward begins swaps": "idle",
}


@pytest.mark.parametrize("fault", FAULTS.values(), ids=FAULTS.keys())
def test_faults_are_seen(request, fault):
    test, args = PLANTED[fault]
    with contextlib.ExitStack() as stack:
        PLANT[fault](stack)
        with pytest.raises((AssertionError, RuntimeError, IndexError)):
            test(*(request.getfixturevalue(name) for name in args))


def _verify(draft_model):
    with engine_of(draft_model, 1) as engine:
        plain = serve(engine, 0, 1)
        assert serve(engine, 3, 1) == plain


def _second_swap(stack):
    attend = NSAOffloadCoordinator._handle_sparse_retrieve

    def by_tensor(self, query, layer, *args, topk_indices, **more):
        if self._swap is not None and self._swap.topk.shape != topk_indices.shape:
            self._swap = None
            assert len(topk_indices) == len(self.inputs.page_table), "a swap of another shape"
        return attend(self, query, layer, *args, topk_indices=topk_indices, **more)

    stack.enter_context(mock.patch.object(NSAOffloadCoordinator, "_handle_sparse_retrieve", by_tensor))


def _short_write_slots(stack):
    stack.enter_context(mock.patch.object(NSAOffloadCoordinator, "pad_write_slots"))


def _idle_swaps(stack):
    from sglang.srt.layers.attention.nsa import nsa_offload_backend

    def or_idle(mode):
        return mode.is_decode_or_idle() or mode.is_target_verify()

    stack.enter_context(mock.patch.object(nsa_offload_backend, "is_decode_step", or_idle))


PLANT = {"second_swap": _second_swap, "write_slots": _short_write_slots, "idle": _idle_swaps}
PLANTED = {
    "second_swap": (_verify, ["draft_model"]),
    "write_slots": (_verify, ["draft_model"]),
    "idle": (lambda model: test_idle_forwards_between_steps(model, False), ["tiny_model"]),
}
