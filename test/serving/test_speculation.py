"""Multi-token prediction together with offloading: the same tokens, the same acceptance, nothing left of refused drafts."""

import functools
from collections import Counter
from contextlib import ExitStack
from unittest import mock

import pytest
import torch
from harness import offload
from harness.scheduler import InprocScheduler
from harness.stamps import Stamps
from sglang.srt.mem_cache.sparsity.nsa_offload.adaptor import NSAOffloadBackendAdaptor
from sglang.srt.mem_cache.sparsity.nsa_offload.controller import SparseCacheController
from sglang.srt.mem_cache.sparsity.nsa_offload.coordinator import NSAOffloadCoordinator

PROMPTS = offload.prompts((1, 64, 300, 500), seed=5)
NEW_TOKENS = 24
# The window is the least that a step needs, and every long prompt is longer.
CASES = [("bfloat16", 1), ("fp8_e4m3", 4)]


def engine_with(model, dtype, steps, on, **more):
    """``steps`` drafts a step, 0 for none; with offloading where ``on``."""
    settings = {**offload.server_args(dtype), **offload.speculation_args(steps), **more}
    if on:
        settings.update(offload.offload_args(offload.TOP_K * (steps + 1)))
    return InprocScheduler(model, overlap=True, **settings)


def accepted(engine):
    """Tokens accepted and verify steps of requests, over the engine's life."""
    scheduler = engine.scheduler
    return (
        scheduler.spec_total_num_accept_tokens + scheduler.spec_num_accept_tokens,
        scheduler.spec_total_num_forward_ct + scheduler.spec_num_forward_ct,
    )


def serve(model, dtype, steps, on, prompts=PROMPTS, n=NEW_TOKENS, **more):
    """Tokens and `accepted`."""
    with engine_with(model, dtype, steps, on, **more) as engine:
        tokens = engine.run(prompts, n)
        if on:
            offload.check_idle(engine)
        return tokens, accepted(engine) if steps else None


@functools.lru_cache(maxsize=None)
def without_offloading(model, dtype, steps):
    return serve(model, dtype, steps, on=False)


@pytest.mark.parametrize("dtype, steps", CASES)
def test_tokens_equal_those_without_offloading_and_without_speculation(draft_model, dtype, steps):
    tokens, (num_accepted, num_verified) = without_offloading(draft_model, dtype, steps)
    assert without_offloading(draft_model, dtype, 0)[0] == tokens
    assert serve(draft_model, dtype, steps, on=True) == (tokens, (num_accepted, num_verified))
    print(f"{num_accepted / num_verified:.2f} tokens accepted a step of {steps + 1}")
    assert 1.2 < num_accepted / num_verified < steps + 0.8  # drafts are accepted sometimes and refused sometimes


def test_rows_through_chunks_retraction_and_aborts(draft_model):
    """Byte stamps of every row, after every step; committed rows reach the host once each, and no others do."""
    steps, sent = 3, Counter()
    write = SparseCacheController.write_back

    def recording(controller, device_slots, host_slots):
        write(controller, device_slots, host_slots)
        pool = engine.scheduler.req_to_token_pool.req_to_token
        for rid in engine.unfinished():
            try:
                req = engine.request(rid)
            except KeyError:
                continue
            if req.req_pool_idx is not None:
                own = torch.isin(pool[req.req_pool_idx], host_slots.int()).nonzero().flatten()
                sent.update((rid, req.retraction_count, position) for position in own.tolist())

    with Stamps() as stamps, engine_with(draft_model, "fp8_e4m3", steps, True, chunked_prefill_size=128) as engine:
        with mock.patch.object(SparseCacheController, "write_back", recording):
            rids = [engine.submit(prompt, 100, rid=f"r{i}") for i, prompt in enumerate(PROMPTS)]
            checked = 0
            for step in range(60):
                engine.step()
                checked += sum(stamps.check(engine))
                if step == 20:
                    assert engine.retract(1)
                if step == 30:
                    engine.abort(rids[2])
            decoded = {rid: len(engine.outputs[rid]) for rid in rids}
            engine.drain()
        offload.check_idle(engine)
    assert checked > 50_000
    assert set(sent.values()) == {1}
    for rid, prompt in zip(rids, PROMPTS):
        if rid != rids[2]:
            positions = {position for other, _, position in sent if other == rid}
            assert len(positions) >= decoded[rid] - 1 - (steps + 1)
            assert max(positions) < len(prompt) + 100 + steps  # the last step may run over the end


def test_contexts_up_to_the_models_limit(draft_model, steps=4):
    """The last drafts lie past the limit, where a request row has a few positions more."""
    limit = 512
    prompts = offload.prompts([limit - 1 - NEW_TOKENS], seed=6)
    more = {"context_length": limit, "max_total_tokens": 2048, "prompts": prompts}
    expected = serve(draft_model, "bfloat16", steps, on=False, **more)
    assert serve(draft_model, "bfloat16", steps, on=True, **more) == expected


# -- faults --------------------------------------------------------------------------------------------------------------


def refused_rows_are_written_as_the_next(stack):
    """Write-back takes every draft for accepted, and does not come back to it."""
    end = NSAOffloadCoordinator.forward_end

    def faulty(self, batch, result):
        lens = result.accept_lens
        result.accept_lens = torch.full_like(lens, self.sizes.queries)
        end(self, batch, result)
        result.accept_lens = lens

    stack.enter_context(mock.patch.object(NSAOffloadCoordinator, "forward_end", faulty))


def every_other_row_is_written_back(stack):
    write = SparseCacheController.write_back
    stack.enter_context(
        mock.patch.object(SparseCacheController, "write_back", lambda self, d, h: write(self, d[::2].contiguous(), h[::2].contiguous()))
    )


def drafts_share_the_first_querys_topk(stack):
    adapt = NSAOffloadBackendAdaptor.adapt_for_attn_metadata

    def faulty(self, selected_indices, *args, queries, **kwargs):
        first = selected_indices[::queries].repeat_interleave(queries, 0)
        return adapt(self, first, *args, queries=queries, **kwargs)

    stack.enter_context(mock.patch.object(NSAOffloadBackendAdaptor, "adapt_for_attn_metadata", faulty))


def lengths_lack_the_drafts(stack):
    adapt = NSAOffloadBackendAdaptor.adapt_for_attn_metadata

    def faulty(self, *args, batch_lens, queries, **kwargs):
        return adapt(self, *args, batch_lens=batch_lens - queries + 1, queries=queries, **kwargs)

    stack.enter_context(mock.patch.object(NSAOffloadBackendAdaptor, "adapt_for_attn_metadata", faulty))


def new_rows_of_a_step_share_a_ring_slot(stack):
    begin = NSAOffloadCoordinator.decode_begin

    def faulty(self, *args):
        begin(self, *args)
        slots = self.token_to_kv_pool.write_slots.view(-1, self.inputs.queries)
        slots.copy_(slots[:, :1].clone().expand_as(slots))

    stack.enter_context(mock.patch.object(NSAOffloadCoordinator, "decode_begin", faulty))


FAULTS = [
    refused_rows_are_written_as_the_next,
    every_other_row_is_written_back,
    drafts_share_the_first_querys_topk,
    lengths_lack_the_drafts,
    new_rows_of_a_step_share_a_ring_slot,
]


@functools.lru_cache(maxsize=None)
def long_answers(model):
    return serve(model, "bfloat16", 3, on=False, prompts=PROMPTS[2:3], n=110)


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.__name__)
def test_fault_changes_tokens(draft_model, fault):
    """Rows of the answer come back from the host when they have left the ring."""
    with ExitStack() as stack:
        fault(stack)
        assert serve(draft_model, "bfloat16", 3, on=True, prompts=PROMPTS[2:3], n=110) != long_answers(draft_model)


def test_long_answers_without_a_fault(draft_model):
    assert serve(draft_model, "bfloat16", 3, on=True, prompts=PROMPTS[2:3], n=110) == long_answers(draft_model)
