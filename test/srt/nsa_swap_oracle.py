"""The swap of one layer in plain Python, and consistent random inputs for it."""

import random
from types import SimpleNamespace

import torch

RING_WINDOW_BASE = 64  # device slots before window 0


def age_bucket(age: int) -> int:
    """Ages from 16 on in eighths of their power of two."""
    if age < 16:
        return age
    exponent = age.bit_length() - 1
    return 16 + (exponent - 4) * 8 + (age >> (exponent - 3)) % 8


def offsets(position_at: torch.Tensor) -> dict:
    """Window offset of each position that a window holds: ``{position: offset}``.

    Raises:
        AssertionError: a position stands twice.
    """
    held = [(position, offset) for offset, position in enumerate(position_at.tolist()) if position >= 0]
    assert len(dict(held)) == len(held), "a position stands twice in a window"
    return dict(held)


def swap(case: SimpleNamespace) -> SimpleNamespace:
    """Expected tables, page table, counts and loads ``{(host slot, device slot)}`` of a case."""
    out = SimpleNamespace(
        position_at_offset=case.position_at_offset.clone(),
        last_used=case.last_used.clone(),
        counters=case.counters.clone(),
        page_table=torch.full_like(case.topk, -1),
        loads=[],
    )
    for b, window in enumerate(case.batch_windows.tolist()):
        topk = case.topk[b].tolist()
        if window < 0:
            out.page_table[b] = torch.where(case.topk[b] >= 0, 0, -1)
            continue
        seq_len = int(case.seq_lens[b])
        base = RING_WINDOW_BASE + window * case.window_slots
        offset_of = offsets(case.position_at_offset[window])
        first_in_ring = max(int(case.ring_begin[window]), seq_len - case.ring_slots)
        in_lru = [p for p in topk if 0 <= p < first_in_ring]
        touched = {offset_of[p] for p in in_lru if p in offset_of}
        misses = list(dict.fromkeys(p for p in in_lru if p not in offset_of))
        free = [o for o in range(case.lru_slots) if o not in touched]
        stamps = case.last_used[window].tolist()
        bucket = {o: age_bucket((seq_len - stamps[o]) % 65536) for o in free}
        chosen = sorted(free, key=lambda o: (-bucket[o], o))[: len(misses)]
        boundary = min((bucket[o] for o in chosen), default=0)
        victims = sorted(chosen, key=lambda o: (bucket[o] == boundary, o))
        for victim, position in zip(victims, misses):
            out.position_at_offset[window, victim] = position
            host_slot = int(case.req_to_token[case.request_rows[b], position])
            out.loads.append((host_slot, base + victim))
        # What only drafts select is no younger than before, and enters older than what was used of late.
        now_at = offsets(out.position_at_offset[window])
        lasting = {now_at[p] for p in topk[: case.lasting] if p in in_lru}
        for offset in lasting | set(victims):
            age = 0 if offset in lasting else 16384
            out.last_used[window, offset] = (seq_len - age + 32768) % 65536 - 32768
        for i, p in enumerate(topk):
            if p >= first_in_ring:
                out.page_table[b, i] = base + case.lru_slots + p % case.ring_slots
            elif p >= 0:
                out.page_table[b, i] = base + now_at[p]
        in_ring = sum(p >= first_in_ring for p in topk)
        hits = sum(p in in_lru and p in offset_of for p in topk)
        out.counters += torch.tensor([hits, in_ring, len(misses)])
    return out


SHAPES = (  # (top-k, LRU slots, ring slots, context)
    (64, 64, 64, 300),
    (16, 72, 3, 200),
    (24, 192, 64, 500),
    (100, 192, 1, 260),
    (7, 8, 5, 64),
    (33, 100, 64, 129),
    (128, 1024, 64, 2000),
)


def random_case(
    seed: int, batch: int = 4, shape=None, stale: bool = False, duplicates: bool = False, apart: int = 0
) -> SimpleNamespace:
    """One layer's inputs, on the CPU: consistent tables, a ragged batch, one row of padding, one without entries.

    Args:
        stale: stamps have wrapped, as after very long runs: untouched slots may look as young as touched ones.
        duplicates: some positions stand twice in a top-k.
        apart: only positions that are near each other modulo this, in top-k and windows.
    """
    rng = random.Random(seed)

    def near(end: int):
        return [p for p in range(end) if p % apart < 24] if apart else range(end)

    k, lru_slots, ring_slots, context = shape or SHAPES[seed % len(SHAPES)]
    windows = batch + 2
    case = SimpleNamespace(k=k, lru_slots=lru_slots, ring_slots=ring_slots, context=context)
    case.window_slots = lru_slots + ring_slots
    case.position_at_offset = torch.full((windows, lru_slots), -1, dtype=torch.int32)
    case.last_used = torch.zeros((windows, lru_slots), dtype=torch.int16)
    case.counters = torch.tensor([5, 6, 7])
    case.ring_begin = torch.tensor([rng.randrange(context) for _ in range(windows)], dtype=torch.int32)
    case.batch_windows = torch.tensor(rng.sample(range(windows), batch), dtype=torch.int32)
    case.seq_lens = torch.tensor([rng.randint(1, context) for _ in range(batch)], dtype=torch.int32)
    case.topk = torch.full((batch, k), -1, dtype=torch.int32)
    for b, (window, seq_len) in enumerate(zip(case.batch_windows.tolist(), case.seq_lens.tolist())):
        chosen = rng.sample(near(seq_len), min(rng.choice((k, k, k // 2)), len(near(seq_len))))
        if duplicates:
            chosen = (chosen + chosen[: len(chosen) // 3])[:k]
        for place, position in zip(rng.sample(range(k), len(chosen)), chosen):
            case.topk[b, place] = position
        held = rng.sample(near(context), min(len(near(context)), rng.choice((lru_slots, lru_slots // 2, 0))))
        for position, offset in zip(held, rng.sample(range(lru_slots), len(held))):
            case.position_at_offset[window, offset] = position
        span = rng.choice((4, 40, 400))
        ages = [1 + rng.randrange(span) for _ in range(lru_slots)]
        if stale:
            ages = [rng.choice((0, 0, 0, age, rng.randrange(65536))) for age in ages]
        stamps = [(seq_len - age + 32768) % 65536 - 32768 for age in ages]
        case.last_used[window] = torch.tensor(stamps, dtype=torch.int16)
    if batch > 2:
        case.batch_windows[rng.randrange(batch)] = -1
        case.topk[rng.randrange(batch)] = -1
    case.request_rows = torch.tensor(rng.sample(range(batch + 3), batch), dtype=torch.int32)
    # Few host slots, so that requests share some; or many, so that blocks take more than one chunk of them.
    case.num_host_rows = 2 * context + 37 + (9000 if seed % 4 == 1 else 0)
    case.req_to_token = torch.stack(
        [torch.tensor(rng.sample(range(case.num_host_rows), context + 5)) for _ in range(batch + 3)]
    ).int()
    case.lasting = rng.choice((k, k // 3))
    return case
