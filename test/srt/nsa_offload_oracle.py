"""Slow versions of the decode offload kernels and of the LRU, in plain Python, and tools for tests.

Import it before SGLang: without a GPU it turns on Triton's interpreter, which Triton reads on import.
"""

import importlib.util
import inspect
import os
import random
import sys
import tempfile
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType, SimpleNamespace
from unittest import mock

import torch

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
if DEVICE == "cpu":
    os.environ.setdefault("TRITON_INTERPRET", "1")
    os.environ.setdefault("SGLANG_USE_CPU_ENGINE", "1")

POISON = 0x5A5A5A5


# ---- kernels: the signatures of sglang.jit_kernel.triton.nsa_kv_offload, CPU tensors ----------


def resolve_topk(
    topk,
    batch_windows,
    seq_lens,
    ring_begin,
    offset_of_position,
    touched,
    counters,
    lru_slots,
    ring_slots,
):
    bs, k = topk.shape
    offsets = torch.full((bs, k), -1, dtype=torch.int32)
    ranks, positions = offsets.clone(), offsets.clone()
    counts = torch.zeros((bs,), dtype=torch.int32)
    for b in range(bs):
        window = int(batch_windows[b])
        if window < 0:
            continue
        first_in_ring = max(int(ring_begin[window]), int(seq_lens[b]) - ring_slots)
        for i, position in enumerate(topk[b].tolist()):
            if position < 0:
                continue
            if position >= first_in_ring:
                offsets[b, i] = lru_slots + position % ring_slots
                counters[1] += 1
                continue
            held = int(offset_of_position[window, position])
            if held >= 0:
                offsets[b, i] = held
                touched[window, held] = 1
                counters[0] += 1
            else:
                ranks[b, i] = counts[b]
                positions[b, counts[b]] = position
                counts[b] += 1
                counters[2] += 1
    return offsets, ranks, positions, counts


def pick_victims(batch_windows, miss_count, lru_order, touched, k):
    victims = torch.full((len(miss_count), k), -1, dtype=torch.int32)
    for b, window in enumerate(batch_windows.tolist()):
        if window >= 0:
            free = [o for o in lru_order[window].tolist() if not touched[window, o]]
            for i in range(int(miss_count[b])):
                victims[b, i] = free[i]
    return victims


def lru_post_process(
    batch_windows,
    miss_count,
    miss_positions,
    victim_offsets,
    lru_order,
    touched,
    position_at_offset,
    offset_of_position,
):
    for b, window in enumerate(batch_windows.tolist()):
        if window < 0:
            continue
        count = int(miss_count[b])
        victims = victim_offsets[b, :count].tolist()
        for victim in victims:
            old = int(position_at_offset[window, victim])
            if old >= 0 and int(offset_of_position[window, old]) == victim:
                offset_of_position[window, old] = -1
        for victim, new in zip(victims, miss_positions[b, :count].tolist()):
            position_at_offset[window, victim] = new
            offset_of_position[window, new] = victim
        order = lru_order[window].tolist()
        hits = [o for o in order if touched[window, o]]
        kept = [o for o in order if o not in hits and o not in victims]
        lru_order[window] = torch.tensor(kept + hits + victims, dtype=torch.int16)
        touched[window] = 0


def build_gpu_page_table(
    topk,
    batch_windows,
    window_offsets,
    miss_rank,
    victim_offsets,
    first_window_slot,
    window_slots,
):
    table = torch.full(topk.shape, -1, dtype=torch.int32)
    targets = torch.full(topk.shape, -1, dtype=torch.int64)
    for b, window in enumerate(batch_windows.tolist()):
        base = first_window_slot + window * window_slots
        for i, position in enumerate(topk[b].tolist()):
            rank = int(miss_rank[b, i])
            offset = int(victim_offsets[b, rank] if rank >= 0 else window_offsets[b, i])
            if position >= 0:
                table[b, i] = base + offset if window >= 0 else 0
            if victim_offsets[b, i] >= 0:
                targets[b, i] = base + int(victim_offsets[b, i])
    return table, targets


def map_seq_positions_to_host_slots(positions, batch_rows, req_to_token):
    slots = torch.full(positions.shape, -1, dtype=torch.int64)
    for b, row in enumerate(batch_rows.tolist()):
        for i, position in enumerate(positions[b].tolist()):
            if position >= 0:
                slots[b, i] = int(req_to_token[row, position])
    return slots


class WindowOracle:
    """One window of one layer: a dict from what an offset holds to the offset, oldest first.

    An empty offset is held by the key ``("empty", offset)``.
    """

    def __init__(self, lru_slots: int, ring_slots: int, ring_begin: int):
        self.lru_slots, self.ring_slots, self.ring_begin = lru_slots, ring_slots, ring_begin
        self.entries = {("empty", offset): offset for offset in range(lru_slots)}

    def step(self, topk: list, seq_len: int) -> tuple:
        """Returns the window offset of each top-k entry and the loads, (position, offset)."""
        first_in_ring = max(self.ring_begin, seq_len - self.ring_slots)
        in_lru = [p for p in topk if 0 <= p < first_in_ring]
        hits = [p for p in self.entries if p in set(in_lru)]
        misses = [p for p in in_lru if p not in self.entries]
        victims = [key for key in self.entries if key not in set(hits)][: len(misses)]
        loads = [(p, self.entries.pop(victim)) for p, victim in zip(misses, victims)]
        for position in hits:
            self.entries[position] = self.entries.pop(position)
        self.entries.update(loads)
        offsets = [
            -1
            if p < 0
            else self.lru_slots + p % self.ring_slots
            if p >= first_in_ring
            else self.entries[p]
            for p in topk
        ]
        return offsets, loads

    def resident(self) -> dict:
        return {p: o for p, o in self.entries.items() if not isinstance(p, tuple)}


# ---- cases -------------------------------------------------------------------------------------

SHAPES = (  # (top-k, LRU slots, ring slots, context)
    (64, 64, 64, 300),
    (16, 64, 3, 200),
    (24, 192, 64, 500),
    (100, 192, 1, 260),
    (7, 7, 5, 64),
    (33, 100, 64, 129),
)


def random_case(seed: int, batch: int = 4, residency: str = "") -> SimpleNamespace:
    """Inputs of all kernels for one layer, on the CPU: consistent tables, a ragged batch.

    Args:
        residency: ``all``, ``none``, or by chance where empty.
    """
    rng = random.Random(seed)
    k, lru_slots, ring_slots, context = SHAPES[seed % len(SHAPES)]
    windows = batch + 2
    case = SimpleNamespace(k=k, lru_slots=lru_slots, ring_slots=ring_slots)
    case.offset_of_position = torch.full((windows, context), -1, dtype=torch.int16)
    case.position_at_offset = torch.full((windows, lru_slots), -1, dtype=torch.int32)
    case.lru_order = torch.stack(
        [torch.tensor(rng.sample(range(lru_slots), lru_slots)) for _ in range(windows)]
    ).short()
    case.touched = torch.zeros((windows, lru_slots), dtype=torch.uint8)
    case.counters = torch.tensor([5, 6, 7])
    case.ring_begin = torch.tensor(
        [rng.randrange(context) for _ in range(windows)], dtype=torch.int32
    )
    case.batch_windows = torch.tensor(rng.sample(range(windows), batch), dtype=torch.int32)
    case.seq_lens = torch.tensor([rng.randint(1, context) for _ in range(batch)])
    case.topk = torch.full((batch, k), -1, dtype=torch.int32)
    for b, (window, seq_len) in enumerate(zip(case.batch_windows, case.seq_lens.tolist())):
        chosen = rng.sample(range(seq_len), min(rng.choice((k, k, k // 2)), seq_len))
        places = rng.sample(range(k), len(chosen))
        case.topk[b, places] = torch.tensor(chosen, dtype=torch.int32)
        if residency == "none":
            continue
        held = chosen if residency == "all" else rng.sample(range(context), lru_slots // 2)
        for position, offset in zip(held, rng.sample(range(lru_slots), len(held))):
            case.offset_of_position[window, position] = offset
            case.position_at_offset[window, offset] = position
    if residency:
        case.ring_begin.fill_(context)
        case.seq_lens.fill_(context)
        case.ring_slots = 1
        case.topk[case.topk == context - 1] = -1
    else:
        case.batch_windows[rng.randrange(batch)] = -1
        case.topk[rng.randrange(batch)] = -1
    case.batch_rows = torch.tensor(rng.sample(range(9), batch), dtype=torch.int32)
    case.req_to_token = torch.randint(0, 1 << 20, (9, context), dtype=torch.int32)
    return case


def run_case(kernels, case: SimpleNamespace, device: str, expected: dict = None) -> dict:
    """Run the five kernels as one layer of one step on copies of a case; every tensor by name.

    With ``expected``, the result of another run, each kernel's outputs are compared before
    the next one reads them, and then every tensor: tables of all windows, untouched inputs.
    """
    t = SimpleNamespace(
        **{
            name: value.to(device, copy=True)
            for name, value in vars(case).items()
            if isinstance(value, torch.Tensor)
        }
    )

    def compare(*names):
        for name in names if expected is not None else ():
            got, want = getattr(t, name).cpu(), expected[name]
            assert got.dtype == want.dtype, f"{name}: {got.dtype}"
            assert torch.equal(got, want), f"{name}:\n{got}\nnot\n{want}"

    t.offsets, t.ranks, t.misses, t.counts = kernels.resolve_topk(
        t.topk,
        t.batch_windows,
        t.seq_lens,
        t.ring_begin,
        t.offset_of_position,
        t.touched,
        t.counters,
        case.lru_slots,
        case.ring_slots,
    )
    t.marks = t.touched.clone()
    compare("offsets", "ranks", "misses", "counts", "marks")
    t.victims = kernels.pick_victims(
        t.batch_windows, t.counts, t.lru_order, t.touched, case.k
    )
    compare("victims")
    t.page_table, t.targets = kernels.build_gpu_page_table(
        t.topk,
        t.batch_windows,
        t.offsets,
        t.ranks,
        t.victims,
        64,
        case.lru_slots + case.ring_slots,
    )
    t.host_slots = kernels.map_seq_positions_to_host_slots(
        t.misses, t.batch_rows, t.req_to_token
    )
    kernels.lru_post_process(
        t.batch_windows,
        t.counts,
        t.misses,
        t.victims,
        t.lru_order,
        t.touched,
        t.position_at_offset,
        t.offset_of_position,
    )
    compare(*vars(t))
    return {name: value.cpu() for name, value in vars(t).items()}


# ---- tools -------------------------------------------------------------------------------------


@contextmanager
def poisoned_empty(margin: int = 64):
    """``torch.empty`` gives poison, with a margin behind it that must be poison at the end."""
    empty, made = torch.empty, []

    def poisoned(shape, **kwargs):
        size = torch.Size(shape).numel()
        whole = empty((size + margin,), **kwargs).fill_(POISON)
        made.append(whole[size:])
        return whole[:size].view(shape)

    with mock.patch.object(torch, "empty", poisoned):
        yield
    assert all((rest == POISON).all() for rest in made), "written past the end"


_FOLDER = tempfile.TemporaryDirectory()  # Triton reads a kernel's source when it first runs


def mutated(module: ModuleType, old: str, new: str) -> ModuleType:
    """A copy of a module with a fault put in; ``old`` must occur in its source."""
    source = inspect.getsource(module)
    if old not in source:  # no AssertionError: that is what callers expect of a fault
        raise LookupError(f"{module.__name__} has no {old!r}")
    name = f"mutated_{len(os.listdir(_FOLDER.name))}"
    path = Path(_FOLDER.name, f"{name}.py")
    path.write_text(source.replace(old, new))
    spec = importlib.util.spec_from_file_location(name, path)
    copy = sys.modules[name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(copy)
    return copy
