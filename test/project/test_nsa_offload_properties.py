"""Decode offloading under generated cases: the CPU reference, the Triton kernels and the oracle."""

from inspect import unwrap
from types import SimpleNamespace

import nsa_offload_oracle as oracle  # first: turns on the interpreter
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule
from sgl_cpu_ref import nsa_offload as reference

from sglang.jit_kernel.triton import nsa_kv_offload
from sglang.srt.mem_cache.sparsity.nsa_offload.lru_cache import LRUCacheState
from sglang.srt.mem_cache.sparsity.nsa_offload.sizing import OffloadSizes
from sglang.srt.mem_cache.sparsity.nsa_offload.staging import PrefillStaging

NAMES = (
    "resolve_topk",
    "pick_victims",
    "lru_post_process",
    "build_gpu_page_table",
    "map_seq_positions_to_host_slots",
)
TRITON = SimpleNamespace(**{name: unwrap(getattr(nsa_kv_offload, name)) for name in NAMES})
QUICK = settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.too_slow])


def same(kernels, case) -> None:
    oracle.run_case(kernels, case, "cpu", expected=oracle.run_case(oracle, case, "cpu"))


@QUICK
@given(st.integers(0, 1 << 30), st.integers(1, 6), st.sampled_from(["", "", "all", "none"]))
def test_reference_equals_oracle(seed, batch, residency):
    same(reference, oracle.random_case(seed, batch, residency))


@settings(QUICK, max_examples=15)
@given(st.integers(0, 1 << 30), st.integers(1, 3))
def test_kernels_equal_oracle(seed, batch):
    same(TRITON, oracle.random_case(seed, batch))


@pytest.mark.parametrize("rows", [0, 3])
def test_reference_without_work(rows):
    case = oracle.random_case(3)
    case.batch_windows.fill_(-1)
    for name in ("topk", "batch_windows", "seq_lens", "batch_rows"):
        setattr(case, name, getattr(case, name)[:rows])
    same(reference, case)


def test_reference_is_installed_and_skipped_where_there_is_nothing(monkeypatch):
    import sys

    from sgl_cpu_ref import nsa_offload

    for name in NAMES:
        monkeypatch.setattr(nsa_kv_offload, name, getattr(TRITON, name))
    nsa_offload.install()
    for name in NAMES:
        assert getattr(nsa_kv_offload, name) is getattr(nsa_offload, name)
        assert unwrap(getattr(nsa_kv_offload, name)) is getattr(TRITON, name)
    monkeypatch.setitem(sys.modules, "sglang.jit_kernel.triton.nsa_kv_offload", None)
    monkeypatch.delattr(sys.modules["sglang.jit_kernel.triton"], "nsa_kv_offload")
    nsa_offload.install()


class Residency(RuleBasedStateMachine):
    """Windows that change owners, against one dict a window and layer."""

    LAYERS, WINDOWS, LRU, RING, CONTEXT, K = 2, 3, 12, 4, 60, 8

    def __init__(self):
        super().__init__()
        self.lru = LRUCacheState(
            self.LAYERS, self.WINDOWS, self.LRU, self.RING, self.CONTEXT, "cpu"
        )
        self.owners = {}  # window: (sequence length, an oracle a layer)

    @precondition(lambda self: len(self.owners) < self.WINDOWS)
    @rule(prompt=st.integers(1, 40))
    def admit(self, prompt):
        window = next(w for w in range(self.WINDOWS) if w not in self.owners)
        self.lru.ring_begin[window] = prompt
        self.owners[window] = [
            prompt,
            [oracle.WindowOracle(self.LRU, self.RING, prompt) for _ in range(self.LAYERS)],
        ]

    @precondition(lambda self: self.owners)
    @rule(data=st.data())
    def release(self, data):
        window = data.draw(st.sampled_from(sorted(self.owners)))
        del self.owners[window]
        self.lru.reset_windows(torch.tensor([window]))

    @precondition(lambda self: self.owners)
    @rule(data=st.data(), padding=st.integers(0, 2))
    def step(self, data, padding):
        batch = [w for w in sorted(self.owners) if self.owners[w][0] < self.CONTEXT]
        for window in batch:
            self.owners[window][0] += 1
        lens = [self.owners[w][0] for w in batch]
        for layer in range(self.LAYERS):
            topk = [
                data.draw(st.lists(st.integers(0, n - 1), max_size=self.K, unique=True))
                for n in lens
            ]
            rows = [row + [-1] * (self.K - len(row)) for row in topk + [[]] * padding]
            windows = torch.tensor(batch + [-1] * padding, dtype=torch.int32)
            tensor = torch.tensor(rows, dtype=torch.int32).view(-1, self.K)
            seq_lens = torch.tensor(lens + [1] * padding)
            swap = self.lru.prepare_layer_swap(layer, tensor, windows, seq_lens)
            self.lru.lru_post_process(layer, windows, swap)
            for b, (window, row) in enumerate(zip(batch, rows)):
                offsets, loads = self.owners[window][1][layer].step(row, lens[b])
                count = int(swap.miss_count[b])
                positions = swap.miss_positions[b, :count].tolist()
                assert loads == list(zip(positions, swap.victim_offsets[b, :count].tolist()))
                hits = [o if o != -1 and p not in positions else -1 for p, o in zip(row, offsets)]
                assert swap.window_offsets[b].tolist() == hits

    @invariant()
    def tables_agree(self):
        self.lru.check_integrity()
        for window in range(self.WINDOWS):
            for layer in range(self.LAYERS):
                table = self.lru.offset_of_position[layer, window].tolist()
                resident = {p: o for p, o in enumerate(table) if o >= 0}
                owner = self.owners.get(window)
                assert resident == (owner[1][layer].resident() if owner else {})


class Staging(RuleBasedStateMachine):
    """Prompts in chunks, released at any time, over host pages that are used again at once."""

    PAGE, PAGES, ROWS = 64, 8, 4

    def __init__(self):
        super().__init__()
        sizes = OffloadSizes(2, 128, 64, self.PAGES * self.PAGE, 1, 656, 512, self.PAGE)
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


TestResidency = Residency.TestCase
TestResidency.settings = settings(QUICK, max_examples=12, stateful_step_count=12)
TestStaging = Staging.TestCase
TestStaging.settings = settings(QUICK, max_examples=40, stateful_step_count=25)
