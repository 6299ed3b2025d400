"""Random lives of requests on the real scheduler: rules that do what clients and operators do, invariants after each.

A `Lab` keeps one engine over many examples; an example ends by draining it and checking that nothing is left. Pools are tiny,
so that decoding retracts and windows and staging pages pass from request to request all the time.
"""

import functools
import time
from collections import Counter
from contextlib import ExitStack
from typing import Callable, Dict, List, Optional, Sequence
from unittest import mock

import hypothesis
from harness import offload
from harness.scheduler import InprocScheduler, SchedulerError
from harness.stamps import Stamps
from hypothesis import HealthCheck, Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule, run_state_machine_as_test

PROMPTS = offload.prompts((1, 5, 64, 129, 300, 450), seed=11)
MAX_NEW_TOKENS = 100
MAX_UNFINISHED = 10
MAX_STEPS_TO_SETTLE = 3000
STATES = ("unreceived", "waiting", "between chunks", "running", "retracted", "finished")
AFTER = st.integers(0, 8)  # rounds of the event loop before a rule acts
ENGINE = {
    "max_total_tokens": 1024,
    "max_running_requests": 4,
    "chunked_prefill_size": 128,
    "schedule_conservativeness": 0.1,  # admit too many, so that decode runs out of memory
}


def reference_tokens(model: str, dtype: str = "bfloat16") -> List[List[int]]:
    """Tokens of every prompt without offloading, alone in a large pool; shorter requests get a prefix of them."""
    with InprocScheduler(model, **offload.server_args(dtype)) as engine:
        return engine.run(PROMPTS, MAX_NEW_TOKENS)


class Lab:
    """One engine under test, rebuilt after a failure, and what has been done to it.

    Args:
        model: checkpoint folder.
        overlap: which event loop.
        expected: tokens of `PROMPTS`; None stamps the rows and checks bytes instead of tokens.
        budget: rounds of the event loop after which rules do nothing more.
        fault: plants a fault until the stack it is given closes.
        offloading: False runs the same lives without the feature, to tell its faults from the base's.
        rules: names of the rules that act; None for all.
        drafts: draft tokens a step; the model must have a layer that makes them.
    """

    def __init__(
        self,
        model: str,
        overlap: bool,
        expected: Optional[Sequence[Sequence[int]]],
        budget: int,
        dtype: str = "bfloat16",
        fault: Optional[Callable[[ExitStack], None]] = None,
        offloading: bool = True,
        rules: Optional[Sequence[str]] = None,
        drafts: int = 0,
    ) -> None:
        self.rules, self.drafts = rules, drafts
        self.expected, self.budget, self.offloading = expected, budget, offloading
        self.counts: Counter = Counter()
        self.first_error: Optional[BaseException] = None
        self.seconds = 0.0
        self._model, self._overlap, self._dtype, self._fault = model, overlap, dtype, fault
        self._stack: Optional[ExitStack] = None
        self._past_steps = 0
        self.engine: Optional[InprocScheduler] = None
        self.stamps: Optional[Stamps] = None

    def __enter__(self) -> "Lab":
        return self

    def __exit__(self, *exc) -> None:
        self.close()

    @property
    def steps(self) -> int:
        """Rounds of the event loop so far, over all engines."""
        return self._past_steps + (self.engine.steps if self.engine else 0)

    @property
    def spent(self) -> bool:
        return self.steps >= self.budget or (self.first_error is not None and self._fault is not None)

    def open(self) -> None:
        """Build the engine where there is none."""
        if self.engine is not None:
            return
        self._stack = ExitStack()
        if self.expected is None:
            self.stamps = self._stack.enter_context(Stamps())
        self._count_calls()
        if self._fault:
            self._fault(self._stack)
        more = offload.speculation_args(self.drafts)
        if self.offloading:
            more.update(offload.offload_args(max(offload.WINDOW, offload.TOP_K * (self.drafts + 1))))
        engine = InprocScheduler(
            self._model, overlap=self._overlap, **offload.server_args(self._dtype), **more, **ENGINE
        )
        self.engine = self._stack.enter_context(engine)
        self.engine.step()

    def close(self) -> None:
        """Free the engine; idempotent."""
        if self.engine is None:
            return
        if self.offloading:
            hits, ring_hits, misses = offload.coordinator(self.engine).lru.counters.sum(0).tolist()
            self.counts.update(lru_hits=hits, ring_hits=ring_hits, misses=misses)
        self._past_steps, self.engine = self.steps, None
        self._stack.close()

    def fail(self, error: BaseException) -> None:
        """Note an error; the engine may be left in any state, so the next example gets a new one."""
        self.first_error = self.first_error or error
        self.close()

    def check_rows(self) -> None:
        if self.stamps is not None:
            self.counts["rows_checked"] += sum(self.stamps.check(self.engine))

    def _count_calls(self) -> None:
        from sglang.srt.managers.schedule_batch import ScheduleBatch
        from sglang.srt.managers.scheduler import Scheduler
        from sglang.srt.mem_cache.sparsity.nsa_offload.lru_cache import LRUCacheState

        release, prepare, counts = ScheduleBatch.release_req, LRUCacheState.prepare_layer_swap, self.counts
        note_drafts = Scheduler.update_spec_metrics

        def release_req(batch, *args, **kwargs):
            counts["retractions"] += 1
            return release(batch, *args, **kwargs)

        def update_spec_metrics(scheduler, batch_size, accepted):
            counts["verified by requests"] += batch_size
            counts["drafts accepted"] += accepted
            note_drafts(scheduler, batch_size, accepted)

        def prepare_layer_swap(lru, layer, *args):
            before = lru.position_at_offset[layer].clone()
            page_table = prepare(lru, layer, *args)
            counts["evictions"] += int(((before >= 0) & (before != lru.position_at_offset[layer])).sum())
            return page_table

        self._stack.enter_context(mock.patch.object(ScheduleBatch, "release_req", release_req))
        self._stack.enter_context(mock.patch.object(LRUCacheState, "prepare_layer_swap", prepare_layer_swap))
        self._stack.enter_context(mock.patch.object(Scheduler, "update_spec_metrics", update_spec_metrics))


def watched(method, kind="rule"):
    """Count a rule or check, skip it where the lab's budget is spent, and note its failure."""

    @functools.wraps(method)
    def run(self, **choices):
        if self.lab.spent or self.failed or (kind == "rule" and self.lab.rules and method.__name__ not in self.lab.rules):
            return
        self.lab.counts[f"{kind} {method.__name__}"] += 1
        try:
            method(self, **choices)
        except BaseException as error:
            self.failed = True
            self.lab.fail(error)
            raise

    return run


checked = functools.partial(watched, kind="check")


class OffloadMachine(RuleBasedStateMachine):
    """Rules over ``lab``, which a subclass sets."""

    lab: Lab

    def __init__(self) -> None:
        super().__init__()
        self.failed = False
        self.prompt_of: Dict[str, int] = {}
        self.length_of: Dict[str, int] = {}
        self.aborted: set = set()
        if not self.lab.spent:
            self.lab.open()

    @property
    def engine(self) -> InprocScheduler:
        return self.lab.engine

    @property
    def paused(self) -> bool:
        return self.engine is not None and self.engine.scheduler._engine_paused

    def running(self) -> List:
        batch = self.engine.scheduler.running_batch
        return [] if batch is None else [req for req in batch.reqs if not req.finished()]

    # -- rules ---------------------------------------------------------------------------------------------------------

    @initialize(prompts=st.lists(st.integers(0, len(PROMPTS) - 1), min_size=2, max_size=5))
    @watched
    def begin(self, prompts):
        for prompt in prompts:
            self._submit(len(PROMPTS) - 1 - prompt, MAX_NEW_TOKENS)  # the simplest example has long prompts

    @rule(prompt=st.integers(0, len(PROMPTS) - 1), n=st.integers(1, MAX_NEW_TOKENS), withdrawn=st.booleans())
    @watched
    def submit(self, prompt, n, withdrawn):
        rid = self._submit(prompt, n)
        if withdrawn and rid is not None:
            self._abort(rid)  # the scheduler receives both at once

    @rule(prompts=st.lists(st.integers(0, len(PROMPTS) - 1), min_size=3, max_size=6), n=st.sampled_from([2, 5, 20, 100]))
    @watched
    def submit_many(self, prompts, n):
        """Short answers make slots, rows and windows change hands; equal ones let requests end together."""
        for i, prompt in enumerate(prompts):
            self._submit(prompt, min(n + i % 3, MAX_NEW_TOKENS))

    @rule(
        first=st.integers(0, 2),
        gap=st.integers(2, 5),
        prompt=st.integers(0, len(PROMPTS) - 1),
        n=st.integers(1, 30),
    )
    @watched
    def submit_as_one_ends(self, first, gap, prompt, n):
        """Where rows are free, the first ends about ``gap`` rounds later, and the second takes over what it had at once.

        The overlapped loop is then still running a forward for the first.
        """
        self._submit(first, 3)
        self._step(gap)
        self._submit(prompt, n)

    @rule(n=st.integers(1, 4))
    @watched
    def step(self, n):
        self._step(n)

    @rule(n=st.integers(4, 30))
    @watched
    def step_on(self, n):
        self._step(n)

    @rule(choice=st.integers(0, 1 << 16), after=AFTER)
    @watched
    def abort(self, choice, after):
        """One in the state that has seen fewest aborts: most states are rare, and a drawn one is empty nearly always."""
        self._step(after)
        found: Dict[str, List[str]] = {}
        for rid in list(self.prompt_of)[-30:]:
            found.setdefault(self._state(rid), []).append(rid)
        if found:
            state = min(sorted(found), key=lambda name: self.lab.counts[f"aborted: {name}"])
            self._abort(found[state][choice % len(found[state])])

    @rule(prompt=st.integers(0, len(PROMPTS) - 1), tokens=st.integers(1, 40))
    @watched
    def abort_running(self, prompt, tokens):
        if self.paused:
            return
        rid = self._submit(prompt, MAX_NEW_TOKENS)
        for _ in range(60):
            if rid is None or rid in self.engine.finished:
                return
            if len(self.engine.outputs[rid]) >= tokens and self._state(rid) == "running":
                self._abort(rid)
                return
            self._step(1)

    @rule(after=st.integers(0, 3))
    @watched
    def abort_between_chunks(self, after):
        if self.paused:
            return
        self._submit(len(PROMPTS) - 1, MAX_NEW_TOKENS)
        for _ in range(12):
            if self.engine.scheduler.chunked_req is not None:
                self._abort(self.engine.scheduler.chunked_req.rid)
                break
            self._step(1)
        self._step(after)

    @rule(rarely=st.integers(0, 3), after=AFTER)
    @watched
    def abort_all(self, rarely, after):
        self._step(after)
        if rarely < 3:
            return  # or nothing grows old
        self.aborted.update(self.engine.unfinished())
        self.engine.abort(all_requests=True)
        self.lab.counts["aborted: all"] += 1

    @rule(after=AFTER, then_abort=st.booleans())
    @watched
    def retract(self, after, then_abort):
        self._step(after)
        if self.paused or len(self.running()) < 2:
            return
        try:
            for rid in self.engine.retract(1, max_steps=8):
                if then_abort and rid in self.prompt_of:
                    self._abort(rid)
        except SchedulerError:  # meanwhile fewer than two ran
            self.lab.counts["retract came too late"] += 1
        self.lab.check_rows()

    @rule(mode=st.sampled_from(["retract", "in_place"]), after=AFTER)
    @watched
    def pause(self, mode, after):
        self._step(after)
        self.engine.pause(mode)
        batch = self.engine.scheduler.running_batch
        if mode == "retract" and batch.is_empty() and batch.batch_is_full:
            # A fault of the base, with and without offloading: the mark stays, and nobody is admitted ever after.
            batch.batch_is_full = False
            self.lab.counts["base's stuck batch_is_full cleared"] += 1

    @precondition(lambda self: self.paused)
    @rule()
    @watched
    def resume(self):
        self.engine.resume()

    @rule(keep=st.sampled_from([64, 128, 256]), after=AFTER)
    @watched
    def pressure(self, keep, after):
        """Occupy most of the pool for a while, in which no request may finish: an idle scheduler would report a leak."""
        self._step(after)
        running = self.running()
        calm = not (self.paused or self.engine._inbox or self.engine.scheduler.chunked_req)
        if not calm or len(running) < 2 or any(req.to_finish for req in running):
            return
        left = min(self.length_of.get(req.rid, 0) - len(req.output_ids) for req in running) - 4
        if left < 1:
            return
        with self.engine.shrunk(keep):
            self._step(min(left, 24))

    @rule()
    @watched
    def flush_now(self):
        """Refused while there is work, harmless always."""
        from sglang.srt.managers.io_struct import FlushCacheReqInput, FlushCacheReqOutput

        self.engine.control(FlushCacheReqInput())
        self.engine.step()
        answer = [r for r in self.engine.replies if isinstance(r, FlushCacheReqOutput)][-1]
        if answer.success:
            assert not self.engine.unfinished(), "flushed over unfinished requests"
            self.lab.counts["flushed"] += 1

    @rule()
    @watched
    def drain_and_flush(self):
        if self.prompt_of and len(self.engine.unfinished()) <= 1 and not self.paused:
            self._settle()
            assert self.engine.flush()
            self.lab.counts["flushed"] += 1

    @rule()
    @watched
    def health_check(self):
        rid = self.engine.health_check()
        self.engine.step()
        if rid in self.engine.finished:
            return
        try:
            self.engine.request(rid)
        except KeyError:  # a busy scheduler drops it
            if not self.paused:
                del self.engine.outputs[rid]
            else:
                self._forget_dropped()

    # -- invariants ----------------------------------------------------------------------------------------------------

    @invariant()
    @checked
    def windows_add_up(self):
        if not self.lab.offloading:
            return
        coordinator = offload.coordinator(self.engine)
        owned = [lease.window.index for lease in coordinator._leases.values()]
        assert len(set(owned)) == len(owned), "a window has two owners"
        assert coordinator.windows.num_free + len(owned) == coordinator.windows.num_windows

    @invariant()
    @checked
    def rows_are_in_place(self):
        self.lab.check_rows()

    @invariant()
    @checked
    def tokens_so_far_are_right(self):
        if self.lab.expected is None:
            return
        for rid, prompt in self.prompt_of.items():
            tokens = self.engine.outputs[rid]
            assert tokens == self.lab.expected[prompt][: len(tokens)], f"{rid}: wrong tokens"

    def teardown(self):
        if self.lab.engine is None or self.failed:
            return
        self.lab.counts["examples"] += 1
        try:
            self._settle()
            self._check_ended()
            if self.lab.offloading:
                offload.check_idle(self.engine)
            else:
                self.engine.idle_checks()
        except BaseException as error:
            self.failed = True
            self.lab.fail(error)
            raise

    # -- inside --------------------------------------------------------------------------------------------------------

    def _submit(self, prompt: int, n: int) -> Optional[str]:
        if len(self.engine.unfinished()) >= MAX_UNFINISHED:
            return None
        self.lab.counts["requests"] += 1
        # An abort matches the beginnings of rids: equal lengths keep it to one.
        rid = f"q{self.lab.counts['requests']:07d}"
        # Of requests that may stop early the base admits too many; of the others it counts every token beforehand.
        self.engine.submit(PROMPTS[prompt], n, rid=rid, ignore_eos=self.lab.counts["requests"] % 3 == 0)
        self.prompt_of[rid], self.length_of[rid] = prompt, n
        return rid

    def _step(self, n: int) -> None:
        for _ in range(n):
            self.engine.step()
            self.lab.check_rows()

    def _abort(self, rid: str) -> None:
        self.lab.counts[f"aborted: {self._state(rid)}"] += 1
        self.aborted.add(rid)
        self.engine.abort(rid)

    def _state(self, rid: str) -> str:
        scheduler = self.engine.scheduler
        if rid in self.engine.finished:
            return "finished"
        if scheduler.chunked_req is not None and scheduler.chunked_req.rid == rid:
            return "between chunks"
        for req in scheduler.waiting_queue:
            if req.rid == rid:
                return "retracted" if req.retraction_count else "waiting"
        try:
            self.engine.request(rid)
        except KeyError:
            return "unreceived"
        return "running"

    def _forget_dropped(self) -> None:
        """Health checks that a busy or paused scheduler dropped never end."""
        scheduler = self.engine.scheduler
        for rid in self.engine.unfinished():
            waits = any(req.rid == rid for req in scheduler.waiting_queue)
            if rid not in self.prompt_of and not waits:
                del self.engine.outputs[rid]

    def _settle(self) -> None:
        if self.paused:
            self.engine.resume()
        for _ in range(MAX_STEPS_TO_SETTLE):
            if not self.engine.unfinished():
                break
            self._step(1)
        self.engine.drain()

    def _check_ended(self) -> None:
        for rid, prompt in self.prompt_of.items():
            tokens, end = self.engine.outputs[rid], self.engine.finished[rid]["type"]
            if self.lab.expected is not None:
                assert tokens == self.lab.expected[prompt][: len(tokens)], f"{rid}: wrong tokens"
            if rid not in self.aborted and (end != "stop" or self.lab.expected is not None):
                assert end == "length", f"{rid} ended by {self.engine.finished[rid]}"
                assert len(tokens) == self.length_of[rid], f"{rid} has {len(tokens)} of {self.length_of[rid]} tokens"


def live(lab: Lab, seed: int = 0, rules: int = 50) -> None:
    """Run examples until the lab's budget is spent; raises what the rules and invariants raise.

    The same seed and budget give the same lives. Failing examples are reported as found, not shrunk: each attempt would
    need a new engine.
    """
    begin = time.monotonic()
    machine = type("Machine", (OffloadMachine,), {"lab": lab})
    try:
        while not lab.spent:
            hypothesis.seed(seed)(machine)
            seed += 1
            options = settings(
                max_examples=10,
                stateful_step_count=rules,
                deadline=None,
                database=None,
                phases=[Phase.generate],
                suppress_health_check=list(HealthCheck),
            )
            run_state_machine_as_test(machine, settings=options)
    finally:
        lab.close()
        lab.seconds = round(time.monotonic() - begin, 1)
