"""The real SGLang scheduler in this process, stepped by hand.

    with InprocScheduler(tiny_model, kv_cache_dtype="fp8_e4m3") as engine:
        rid = engine.submit(prompt_ids, 16)
        engine.drain()
        print(engine.outputs[rid])

Requests enter where the scheduler's socket would have delivered them, and results leave where it would have sent them;
everything between, the event loop included, is SGLang's own code.
"""

import contextlib
import gc
import itertools
from typing import Any, Dict, Iterator, List, Optional, Sequence
from unittest import mock

from harness.environment import ON_GPU  # (environment before sglang)

from harness.server import free_port
from harness.stepper import Stepper

MAX_STEPS = 20000

SERVER_DEFAULTS: Dict[str, Any] = {
    "device": "cuda" if ON_GPU else "cpu",
    "attention_backend": "nsa",
    "max_total_tokens": 20032,
    "max_running_requests": 16,
    "mem_fraction_static": 0.1,
    "skip_tokenizer_init": True,
    "log_level": "error",
    "disable_overlap_schedule": True,
}


class SchedulerError(AssertionError):
    """The scheduler did something a test does not expect: no progress, a request aborted."""


class _Sink:
    """Stands in for the sockets to the tokenizer and the detokenizer."""

    def __init__(self) -> None:
        self.messages: List[Any] = []

    def send_output(self, output, recv_obj=None) -> None:
        self.messages.append(output)


class InprocScheduler:
    """One scheduler with its model, pools and event loop. One at a time in a process; close one before the next.

    Args:
        model_path: checkpoint folder.
        overlap: run the overlapped event loop rather than the normal one.
        server_args: fields of SGLang's ServerArgs, over `SERVER_DEFAULTS`.

    Attributes:
        scheduler: SGLang's Scheduler.
        outputs: rid to the output tokens so far, over the request's whole life.
        finished: rid to the finish reason (a dict; "type" is "length", "stop" or "abort").
        replies: answers to `control` requests, and other messages to the tokenizer, in order.
    """

    def __init__(self, model_path, overlap: bool = False, **server_args) -> None:
        self.outputs: Dict[str, List[int]] = {}
        self.finished: Dict[str, Dict[str, Any]] = {}
        self.replies: List[Any] = []
        self.steps = 0
        self._inbox: List[Any] = []
        self._numbers = itertools.count()
        self._sink = _Sink()
        settings = {**SERVER_DEFAULTS, "model_path": str(model_path), **server_args}
        if overlap:
            settings["disable_overlap_schedule"] = False
        self.scheduler: Optional[Any] = None
        self._stepper: Optional[Stepper] = None
        self._sockets: List[Any] = []
        try:
            with _recorded_sockets(self._sockets):
                self.scheduler = _build(settings)
        except BaseException:
            _close_sockets(self._sockets)
            _forget_globals()
            raise
        self.scheduler.send_to_tokenizer = self._sink
        self.scheduler.send_to_detokenizer = self._sink
        self.scheduler.recv_requests = self._receive
        self._stepper = Stepper(self.scheduler.run_event_loop)

    # -- life ----------------------------------------------------------------------------------------------------------

    def __enter__(self) -> "InprocScheduler":
        return self

    def __exit__(self, *exc) -> None:
        self.close()

    def close(self) -> None:
        """End the event loop and free everything, so that another scheduler can be built; idempotent."""
        if self.scheduler is None:
            return
        self._stepper.stop()
        scheduler, self.scheduler, self._stepper = self.scheduler, None, None
        del scheduler.recv_requests
        _close_sockets(self._sockets)
        _drop_tensors(scheduler)
        del scheduler
        _forget_globals()

    # -- parts of the scheduler ----------------------------------------------------------------------------------------

    @property
    def model_runner(self):
        return self.scheduler.tp_worker.model_runner

    @property
    def kv_pool(self):
        """The device's KV pool; ``kv_buffer[layer]`` holds the rows by slot."""
        return self.model_runner.token_to_kv_pool

    @property
    def attention_backend(self):
        return self.model_runner.attn_backend

    def request(self, rid: str):
        """SGLang's Req of a request that waits or runs; KeyError otherwise."""
        s = self.scheduler
        batches = [s.running_batch, s.last_batch, s.cur_batch]
        waiting = list(s.waiting_queue) + [s.chunked_req]
        for req in itertools.chain(waiting, *(b.reqs for b in batches if b is not None)):
            if req is not None and req.rid == rid and not req.finished():
                return req
        raise KeyError(rid)

    def slots(self, rid: str):
        """Slots of a running request by position: int32 [tokens with KV]."""
        req = self.request(rid)
        length = req.kv_committed_len
        return self.scheduler.req_to_token_pool.req_to_token[req.req_pool_idx, :length].clone()

    # -- requests ------------------------------------------------------------------------------------------------------

    def submit(self, ids: Sequence[int], max_new_tokens: int = 16, rid: Optional[str] = None, **sampling) -> str:
        """Queue a request, greedy unless ``sampling`` says otherwise; it is received by the next step. Returns its rid.

        Keys of ``sampling`` that name fields of TokenizedGenerateReqInput (such as ``bootstrap_room``) go there.
        """
        rid = rid or f"r{next(self._numbers)}"
        if rid in self.outputs:
            raise ValueError(f"rid {rid} was used before")
        self.outputs[rid] = []
        self._inbox.append(_tokenized(rid, ids, max_new_tokens, sampling))
        return rid

    def health_check(self) -> str:
        """Queue the request that the HTTP server's health check sends. Returns its rid.

        A busy scheduler drops it, as upstream does: the other requests prove its health.
        """
        from sglang.srt.constants import HEALTH_CHECK_RID_PREFIX

        return self.submit([0], 1, rid=f"{HEALTH_CHECK_RID_PREFIX}_{next(self._numbers)}")

    def abort(self, rid: str = "", all_requests: bool = False) -> None:
        """Queue an abort; the next step handles it, whatever state the request is in."""
        from sglang.srt.managers.io_struct import AbortReq

        self.control(AbortReq(rid=rid, abort_all=all_requests))

    def control(self, message) -> None:
        """Queue any request object of SGLang's io_struct; an answer appears in `replies`."""
        self._inbox.append(message)

    def pause(self, mode: str = "retract") -> None:
        """Pause generation at the next step; mode is "retract", "in_place" or "abort". Takes that step."""
        from sglang.srt.managers.io_struct import PauseGenerationReqInput

        self.control(PauseGenerationReqInput(mode=mode))
        self.step()

    def resume(self) -> None:
        """Continue after `pause`, from the next step on."""
        from sglang.srt.managers.io_struct import ContinueGenerationReqInput

        self.control(ContinueGenerationReqInput())

    # -- stepping ------------------------------------------------------------------------------------------------------

    def step(self):
        """One round of the event loop. Returns the batch it launched, or None.

        Exceptions of the scheduler, leak reports included, are raised here.
        """
        self._stepper.step()
        self.steps += 1
        self._collect()
        batch = self.scheduler.cur_batch
        return batch if batch is not None and not self.scheduler._engine_paused else None

    def step_until(self, done, max_steps: int = MAX_STEPS) -> None:
        """Step until ``done()``, tested before each step; SchedulerError after ``max_steps``."""
        for _ in range(max_steps):
            if done():
                return
            self.step()
        raise SchedulerError(f"not done after {max_steps} steps; unfinished: {self.unfinished()}")

    def unfinished(self) -> List[str]:
        """rids that were submitted and have no finish reason yet."""
        return [rid for rid in self.outputs if rid not in self.finished]

    def drain(self) -> None:
        """Step until every request has finished and the scheduler has been idle for a round (with its leak checks)."""
        self.step_until(lambda: not self.unfinished())
        self.step_until(self.scheduler.is_fully_idle)
        self.step()

    def run(self, prompts: Sequence[Sequence[int]], n: int = 16, **sampling) -> List[List[int]]:
        """Submit all, drain, and return their outputs in order; SchedulerError where one was aborted."""
        rids = [self.submit(ids, n, **sampling) for ids in prompts]
        self.drain()
        for rid in rids:
            if self.finished[rid]["type"] == "abort":
                raise SchedulerError(f"{rid}: {self.finished[rid]}")
        return [self.outputs[rid] for rid in rids]

    def retract(self, n: int = 1, max_steps: int = 50) -> List[str]:
        """Step until upstream's decode-out-of-memory path has retracted ``n`` running requests; returns their rids.

        The memory check of the decode batch is made to fail ``n`` times; choice, release and requeueing are
        upstream's. Upstream always keeps one request, so more than ``n`` must be running.
        """
        from sglang.srt.managers.schedule_batch import ScheduleBatch

        check, failures = ScheduleBatch.check_decode_mem, [n]

        def fail_first(batch, *args, **kwargs):
            if failures[0] > 0 and batch.batch_size() > n:
                failures[0] -= 1
                return False
            return check(batch, *args, **kwargs)

        before = {rid: self._retractions(rid) for rid in self.unfinished()}
        ScheduleBatch.check_decode_mem = fail_first
        try:
            self.step_until(lambda: failures[0] == 0, max_steps)
        finally:
            ScheduleBatch.check_decode_mem = check
        return [rid for rid, count in before.items() if self._retractions(rid) > count]

    @contextlib.contextmanager
    def shrunk(self, keep: int) -> Iterator[None]:
        """While open, at most ``keep`` tokens of the pool are free: memory pressure by real occupation.

        The scheduler must not become idle meanwhile, or its leak check reports the occupied part.
        """
        allocator = self.scheduler.token_to_kv_pool_allocator
        page = allocator.page_size
        count = max(0, allocator.available_size() - keep) // page * page
        held = allocator.alloc(count) if count else None
        try:
            yield
        finally:
            if held is not None:
                allocator.free(held)

    def flush(self) -> bool:
        """Drain, then flush the cache as the HTTP call does. Returns whether it succeeded."""
        from sglang.srt.managers.io_struct import FlushCacheReqInput, FlushCacheReqOutput

        self.drain()
        self.control(FlushCacheReqInput())
        self.step()
        return [r for r in self.replies if isinstance(r, FlushCacheReqOutput)][-1].success

    def idle_checks(self) -> None:
        """The scheduler's idle housekeeping; raises on a leak. SchedulerError where it is not idle."""
        if not self.scheduler.is_fully_idle():
            raise SchedulerError(f"not idle: {self.unfinished()}")
        self.scheduler.on_idle()

    # -- inside --------------------------------------------------------------------------------------------------------

    def _receive(self) -> List[Any]:
        self._stepper.pause()
        inbox, self._inbox = self._inbox, []
        return inbox

    def _retractions(self, rid: str) -> int:
        try:
            return self.request(rid).retraction_count
        except KeyError:
            return 0

    def _collect(self) -> None:
        from sglang.srt.managers.io_struct import AbortReq, BatchTokenIDOutput

        messages, self._sink.messages = self._sink.messages, []
        for message in messages:
            if isinstance(message, BatchTokenIDOutput):
                for rid, ids, reason in zip(message.rids, message.output_ids, message.finished_reasons):
                    self.outputs[rid].extend(ids)
                    if reason is not None:
                        self.finished[rid] = reason
            elif isinstance(message, AbortReq):
                self.finished[message.rid] = message.finished_reason or {"type": "abort"}
            else:
                self.replies.append(message)


def _build(settings: Dict[str, Any]):
    from sglang.srt.plugins import load_plugins

    load_plugins()
    import sgl_cpu_ref
    from sglang.srt.managers.scheduler import Scheduler
    from sglang.srt.server_args import PortArgs, ServerArgs, set_global_server_args_for_scheduler

    if not ON_GPU and not sgl_cpu_ref.is_active():
        raise SchedulerError("the sgl_cpu_ref plugin is not active")
    # A port that SGLang draws may be given away before it listens there.
    server_args = ServerArgs(**{"nccl_port": free_port(), **settings})
    set_global_server_args_for_scheduler(server_args)
    # The watchdog outlives its scheduler, keeps it in memory, and five minutes after a failed start kills the parent:
    # here, the test runner.
    with mock.patch("sglang.srt.managers.scheduler.create_scheduler_watchdog", lambda *args, **kwargs: None):
        return Scheduler(
            server_args=server_args,
            port_args=PortArgs.init_new(server_args),
            gpu_id=0,
            tp_rank=0,
            moe_ep_rank=0,
            pp_rank=0,
            attn_cp_rank=0,
            moe_dp_rank=0,
            dp_rank=None,
        )


def _tokenized(rid: str, ids: Sequence[int], max_new_tokens: int, options: Dict[str, Any]):
    import dataclasses

    from sglang.srt.managers.io_struct import TokenizedGenerateReqInput
    from sglang.srt.sampling.sampling_params import SamplingParams

    names = {field.name for field in dataclasses.fields(TokenizedGenerateReqInput)}
    fields = {key: value for key, value in options.items() if key in names}
    sampling = {key: value for key, value in options.items() if key not in names}
    params = SamplingParams(
        **{"temperature": 0, "ignore_eos": True, **sampling, "max_new_tokens": max_new_tokens}
    )
    params.normalize(None)
    basics = {
        "input_text": "",
        "input_ids": list(ids),
        "mm_inputs": None,
        "sampling_params": params,
        "return_logprob": False,
        "logprob_start_len": -1,
        "top_logprobs_num": 0,
        "token_ids_logprob": None,
        "stream": True,
    }
    return TokenizedGenerateReqInput(rid=rid, **{**basics, **fields})


@contextlib.contextmanager
def _recorded_sockets(sockets: List[Any]) -> Iterator[None]:
    """While open, sockets that are made go to the list too."""
    import zmq

    make = zmq.Context.socket

    def recording(context, *args, **kwargs):
        sockets.append(make(context, *args, **kwargs))
        return sockets[-1]

    with mock.patch.object(zmq.Context, "socket", recording):
        yield


def _close_sockets(sockets: List[Any]) -> None:
    """A context that is collected ahead of its open sockets waits for them for ever."""
    while sockets:
        sockets.pop().close(linger=0)


def _drop_tensors(scheduler) -> None:
    """Free weights and pools: SGLang's threads keep a scheduler alive, and a test process builds dozens."""
    runner = scheduler.tp_worker.model_runner
    owners = [runner.model, runner.token_to_kv_pool, runner.attn_backend]
    coordinator = getattr(runner.req_to_token_pool, "sparse_coordinator", None)
    if coordinator is not None:
        coordinator.close()
        owners += [coordinator.host_pool, coordinator.lru, coordinator.controller, coordinator.staging, coordinator]
    owners += [runner.req_to_token_pool, getattr(runner, "hisparse_coordinator", None)]
    if not scheduler.spec_algorithm.is_none():
        draft = scheduler.draft_worker.draft_worker.draft_runner
        owners += [draft.model, draft.token_to_kv_pool, draft.attn_backend]
    for owner in owners:
        if owner is not None:
            owner.__dict__.clear()


def _forget_globals() -> None:
    """Undo what building a scheduler leaves in SGLang's modules."""
    import sglang.srt.eplb.expert_location as expert_location
    from sglang.srt.distributed import parallel_state
    from sglang.srt.model_executor import input_buffers
    from sglang.srt.utils.hf_transformers.config import get_config

    get_config.cache_clear()  # a draft model has renamed the architecture in it
    gc.collect()
    parallel_state.destroy_model_parallel()
    parallel_state.destroy_distributed_environment()
    expert_location._global_expert_location_metadata = None
    # The next scheduler's graphs would warm up with this one's request rows and slots, which it may not have.
    input_buffers._forward_input_buffer_pool.clear()
    gc.collect()
