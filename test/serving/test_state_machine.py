"""Random lives of requests: nothing raises, leaks, hangs or answers wrongly, and planted lifecycle faults do show.

    STATE_MACHINE_STEPS=10000 STATE_MACHINE_OUT=benchmark/kv_offload/results/cpu/state_machine.json \\
        python -m pytest test/serving/test_state_machine.py -k lives
"""

import functools
import json
import os
import re
from pathlib import Path
from unittest import mock

import pytest
from serving import state_machine
from serving.state_machine import Lab, live
from sglang.srt.mem_cache.sparsity.nsa_offload.coordinator import NSAOffloadCoordinator
from sglang.srt.mem_cache.sparsity.nsa_offload.lru_cache import LRUCacheState
from sglang.srt.mem_cache.sparsity.nsa_offload.staging import PrefillStaging

STEPS = int(os.environ.get("STATE_MACHINE_STEPS", "390"))
SEED = int(os.environ.get("STATE_MACHINE_SEED", "1"))
OUT = os.environ.get("STATE_MACHINE_OUT")
FAULT_STEPS, FAULT_SEED = 800, 1

# Loop, what is compared, KV dtype, draft tokens a step.
VARIANTS = [
    ("normal", "tokens", "bfloat16", 0),
    ("overlap", "tokens", "bfloat16", 0),
    ("normal", "bytes", "bfloat16", 0),
    ("overlap", "bytes", "fp8_e4m3", 0),
    ("overlap", "tokens", "bfloat16", 2),
    ("overlap", "bytes", "fp8_e4m3", 3),
]


@functools.lru_cache(maxsize=None)
def reference_tokens(model):
    return state_machine.reference_tokens(model)


@pytest.fixture
def expected(tiny_model):
    return reference_tokens(tiny_model)


@pytest.fixture(scope="module")
def figures():
    """Figures by variant; written to STATE_MACHINE_OUT at the end."""
    found = {}
    yield found
    if OUT:
        total = {"seed": SEED, "steps": sum(f["steps"] for f in found.values()), "variants": found}
        Path(OUT).parent.mkdir(parents=True, exist_ok=True)
        Path(OUT).write_text(json.dumps(total, indent=1) + "\n")


@pytest.mark.timeout(3600)
@pytest.mark.parametrize("variant", VARIANTS, ids=lambda variant: "-".join(map(str, variant)))
def test_lives(tiny_model, draft_model, figures, variant):
    loop, compared, dtype, drafts = variant
    model = draft_model if drafts else tiny_model
    expected = reference_tokens(model) if compared == "tokens" else None
    with Lab(model, loop == "overlap", expected, STEPS // len(VARIANTS), dtype, drafts=drafts) as lab:
        live(lab, SEED)
    counts = dict(sorted(lab.counts.items()))
    figures["-".join(map(str, variant))] = {"steps": lab.steps, "seconds": lab.seconds, **counts}
    assert counts["requests"] and counts["evictions"]
    aborted = {state: counts.get(f"aborted: {state}", 0) for state in state_machine.STATES}
    assert all(aborted.values()) or lab.steps < 2000, aborted
    assert compared == "tokens" or counts["rows_checked"]
    if drafts:
        assert 0 < counts["drafts accepted"] < drafts * counts["verified by requests"]


def on_request_end_is_skipped(stack):
    stack.enter_context(mock.patch.object(NSAOffloadCoordinator, "on_request_end", lambda *a: None))


def windows_are_not_reset(stack):
    stack.enter_context(mock.patch.object(LRUCacheState, "reset_windows", lambda *a: None))


def staging_is_not_released(stack):
    stack.enter_context(mock.patch.object(PrefillStaging, "release", lambda *a: None))


def admissions_are_not_applied(stack):
    apply = NSAOffloadCoordinator._apply_pending

    def faulty(self):
        self._admitted_rows = []
        apply(self)

    stack.enter_context(mock.patch.object(NSAOffloadCoordinator, "_apply_pending", faulty))


def rows_of_ended_requests_are_written_back(stack):
    begin = NSAOffloadCoordinator.on_request_begin

    def remembering(self, req, first_position=0):
        begin(self, req, first_position)
        req.last_lease = self._leases[req.req_pool_idx]

    def faulty(self, batch, result):
        seq_lens = batch.seq_lens_cpu.tolist()
        slots = [self._ring_slot(req.last_lease, n - 1) for req, n in zip(batch.reqs, seq_lens)]
        self.controller.write_back(batch.out_cache_loc.new_tensor(slots), batch.out_cache_loc)

    stack.enter_context(mock.patch.object(NSAOffloadCoordinator, "on_request_begin", remembering))
    stack.enter_context(mock.patch.object(NSAOffloadCoordinator, "forward_end", faulty))


def releases_come_after_admissions(stack):
    """The new owner of a window passed on within one step is told of an empty ring that begins at 0."""
    apply = NSAOffloadCoordinator._apply_pending

    def faulty(self):
        released, self._released = self._released, []
        apply(self)
        self._released = released
        apply(self)

    stack.enter_context(mock.patch.object(NSAOffloadCoordinator, "_apply_pending", faulty))


HANDOVERS = ("submit_as_one_ends", "step")

# The fault, what is compared, what must be reported, and the rules that act: a fault in a race of one round needs many tries.
FAULTS = [
    (on_request_end_is_skipped, "bytes", "leaked|No device window|rows of layer", None),
    (windows_are_not_reset, "bytes", "resident entries|rows of layer", None),
    (staging_is_not_released, "bytes", "staging pages|exhausted", None),
    (admissions_are_not_applied, "bytes", "rows of layer", None),
    (rows_of_ended_requests_are_written_back, "bytes", "rows of layer", HANDOVERS),
    (releases_come_after_admissions, "tokens", "wrong tokens", HANDOVERS),
]


@pytest.mark.parametrize("fault, compared, message, rules", FAULTS, ids=[fault.__name__ for fault, *_ in FAULTS])
def test_fault_is_caught(tiny_model, expected, fault, compared, message, rules):
    """In the overlapped loop, where a request ends while its next forward runs."""
    tokens = expected if compared == "tokens" else None
    with Lab(tiny_model, True, tokens, FAULT_STEPS, fault=fault, rules=rules) as lab:
        with pytest.raises(Exception):  # hypothesis may wrap it: with the fault found, replays do nothing
            live(lab, FAULT_SEED)
        assert lab.first_error is not None
        assert re.search(message, str(lab.first_error)), repr(lab.first_error)
