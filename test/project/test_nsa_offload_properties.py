"""Decode offloading under generated cases: the kernels' source on the CPU, and the staging of prompts."""

import sys
from pathlib import Path

import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule
from sglang.srt.mem_cache.sparsity.nsa_offload.sizing import OffloadSizes
from sglang.srt.mem_cache.sparsity.nsa_offload.staging import PrefillStaging

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "srt"))
import nsa_swap_oracle as oracle  # noqa: E402
import test_nsa_offload_swap_kernels as swap_test  # noqa: E402

QUICK = settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.too_slow])


@QUICK
@given(st.integers(0, 1 << 30), st.integers(1, 6), st.booleans(), st.booleans(), st.sampled_from(["forward", "chance"]))
def test_kernels_equal_oracle(seed, batch, stale, ordered, order):
    swap_test.TestSwap().compare(oracle.random_case(seed, batch, stale=stale), ordered, order, seed=seed % 1000)


class Staging(RuleBasedStateMachine):
    """Prompts in chunks, released at any time, over host pages that are used again at once."""

    PAGE, PAGES, ROWS = 64, 8, 4

    def __init__(self):
        super().__init__()
        sizes = OffloadSizes(
            num_windows=2,
            window_slots=128,
            lru_slots=64,
            staging_slots=self.PAGES * self.PAGE,
            num_layers=1,
            row_bytes=656,
            page_size=self.PAGE,
            top_k=64,
        )
        self.staging = PrefillStaging(sizes, 20, "cpu")
        self.req_to_token = torch.zeros((self.ROWS, 512), dtype=torch.int32)
        self.free_host = list(range(1, 21))
        self.prompts = {}  # row: [tokens so far, host pages]

    def room(self):
        return self.staging.num_free > 0 and self.free_host

    @precondition(lambda self: self.room())
    @rule(row=st.integers(0, ROWS - 1), tokens=st.integers(1, 150), last=st.booleans())
    def chunk(self, row, tokens, last):
        prompt = self.prompts.setdefault(row, [0, []])
        pages = min(
            -(-(prompt[0] + tokens) // self.PAGE),
            len(prompt[1]) + min(self.staging.num_free, len(self.free_host)),
            512 // self.PAGE,
        )
        length = min(prompt[0] + tokens, pages * self.PAGE)
        if length == prompt[0]:
            return
        for page in range(len(prompt[1]), pages):
            prompt[1].append(self.free_host.pop())
            start = page * self.PAGE
            slots = torch.arange(self.PAGE, dtype=torch.int32) + prompt[1][-1] * self.PAGE
            self.req_to_token[row, start : start + self.PAGE] = slots
        self.staging.stage(row, prompt[0], length, is_last_chunk=False)
        prompt[0] = length
        self.staging.apply_pending(self.req_to_token)
        if last:
            self.finish(row)

    @rule(row=st.integers(0, ROWS - 1))
    def finish(self, row):
        """Release, and give the host pages to the next prompt."""
        self.staging.release(row)
        self.free_host += self.prompts.pop(row, [0, []])[1]

    @invariant()
    def every_staged_token_has_its_own_slot(self):
        self.staging.apply_pending(self.req_to_token)
        seen = set()
        for row, (length, _) in self.prompts.items():
            slots = self.staging.device_slots(self.req_to_token[row, :length]).tolist()
            assert min(slots, default=320) >= 64 + 2 * 128
            assert seen.isdisjoint(slots) and len(set(slots)) == length
            seen.update(slots)
        owned = {page for _, pages in self.prompts.values() for page in pages}
        staged = self.staging.device_page_of_host_page.nonzero().flatten().tolist()
        assert set(staged) == owned
        assert self.staging.num_free == self.PAGES - len(owned)


TestStaging = Staging.TestCase
TestStaging.settings = settings(QUICK, max_examples=40, stateful_step_count=25)
