"""What DP attention makes of a forward, in one process: padded batches, and forwards of an idle rank.

Data-parallel ranks agree on a number of tokens before each eager forward, and SGLang pads every rank's batch to it.
A single rank is made to do so by naming that number itself.
"""

import contextlib
from typing import Callable, Iterator, List, Optional
from unittest import mock

from harness.environment import ON_GPU


@contextlib.contextmanager
def padded(
    extra: Callable[[object], int], queries: int = 1, seen: Optional[List[str]] = None, limit: int = 1 << 30
) -> Iterator[None]:
    """While open, eager forwards of the target model are padded.

    Args:
        extra: requests that a batch (SGLang's ModelWorkerBatch) is padded by; 0 leaves it alone.
        queries: query tokens of a request in a verify step.
        seen: the forward modes that were padded are appended.
        limit: requests of the longest rank, which no padded decode batch exceeds.
    """
    from sglang.srt.model_executor.forward_batch_info import ForwardBatch

    init_new = ForwardBatch.init_new.__func__

    def padded_init(cls, batch, runner):
        requests = 0 if runner.is_draft_worker or batch.forward_mode.is_idle() else extra(batch)
        if batch.forward_mode.is_decode() or batch.forward_mode.is_target_verify():
            requests = min(requests, limit - len(batch.seq_lens))
        if requests > 0:
            unit = queries if batch.forward_mode.is_target_verify() else 1
            _name_tokens(batch, len(batch.input_ids) + requests * unit)
            batch.is_extend_in_batch = batch.forward_mode.is_extend() and not batch.forward_mode.is_target_verify()
            if seen is not None:
                seen.append(batch.forward_mode.name)
        return init_new(cls, batch, runner)

    with mock.patch.object(ForwardBatch, "init_new", classmethod(padded_init)), pinned_where_there_is_a_gpu():
        yield


def idle_forward(engine, tokens: int):
    """Run what a rank without requests runs while others decode ``tokens`` tokens; nothing is sampled.

    With CUDA graphs on the engine it replays the smallest graph, with no request in it; else it is eager.
    """
    import torch

    from sglang.srt.model_executor.forward_batch_info import ForwardBatch

    scheduler = engine.scheduler
    stream = scheduler.forward_stream if scheduler.enable_overlap else scheduler.schedule_stream
    batch = scheduler.get_idle_batch().get_model_worker_batch()
    _name_tokens(batch, tokens)
    batch.is_extend_in_batch = batch.can_run_dp_cuda_graph = False
    with pinned_where_there_is_a_gpu(), scheduler.device_module.StreamContext(stream), torch.inference_mode():
        forward_batch = ForwardBatch.init_new(batch, engine.model_runner)
        return engine.model_runner.forward(forward_batch)


def _name_tokens(batch, tokens: int) -> None:
    batch.global_num_tokens = [tokens]
    batch.global_num_tokens_for_logprob = [tokens]
    if batch.spec_info is not None:
        batch.spec_info.get_spec_adjusted_global_num_tokens = lambda _: ([tokens], [tokens])


@contextlib.contextmanager
def pinned_where_there_is_a_gpu() -> Iterator[None]:
    """SGLang pins the list of token counts, which needs a GPU."""
    import torch

    if ON_GPU:
        yield
        return
    make = torch.tensor
    with mock.patch.object(torch, "tensor", lambda *args, pin_memory=False, **more: make(*args, **more)):
        yield
