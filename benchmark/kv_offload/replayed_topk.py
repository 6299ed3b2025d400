"""Replays top-k lists with a chosen miss rate, in every implementation alike, CUDA graphs included.

Dummy weights choose rows at random, which no model does: the miss rate of a measurement has to be set. The lists of a step
keep (1 - miss rate) of the last step's entries and take positions that were never resident for the rest. They are the same
for every layer, since layers have windows and rows of their own.
"""

from contextlib import contextmanager
from unittest import mock

import torch

NEWEST = 128  # left out of the lists: they are in the ring, and the ring is never missed


def lists_of(steps: int, batch: int, top_k: int, context: int, miss_rate: float, seed: int = 0) -> torch.Tensor:
    """``[steps, batch, top_k]`` int32 positions; the first step's are all new.

    Raises:
        ValueError: the context has too few positions for as many steps.
    """
    generator = torch.Generator().manual_seed(seed)
    new = round(top_k * miss_rate)
    usable = context - NEWEST
    if top_k + (steps - 1) * new > usable:
        raise ValueError(f"{steps} steps with {new} new positions each need more than {usable} positions")
    orders = torch.stack([torch.randperm(usable, generator=generator) for _ in range(batch)])
    rows, lists = orders[:, :top_k], []
    for step in range(steps):
        if step and new:
            rows = rows.clone()
            places = torch.rand(batch, top_k, generator=generator).argsort(1)[:, :new]
            begin = top_k + (step - 1) * new
            rows.scatter_(1, places, orders[:, begin : begin + new])
        lists.append(rows)
    return torch.stack(lists).int()


@contextmanager
def replayed_topk(lists: torch.Tensor, num_layers: int):
    """While open, `sgl_kernel`'s top-k functions give the next step's list after every ``num_layers`` calls.

    Open it before graphs are captured, and call ``play()`` of what it yields when the batch stands.

    Args:
        lists: as `lists_of` makes them, on the device of the model.
        num_layers: calls a forward makes; every one of them is made, or none.
    """
    import sgl_kernel

    step = torch.zeros((1,), dtype=torch.int64, device=lists.device)
    # A layer costs a call and nothing else: the first of a step fills these, the others hand them out. They are made before
    # a graph is captured, since a server runs each batch size once or twice before.
    entries, slots, calls = {}, {}, {"positions": 0, "transform": 0}

    def is_first(kind: str) -> bool:
        calls[kind] += 1
        return calls[kind] % num_layers == 1 or num_layers == 1

    def fill(score, lengths) -> torch.Tensor:
        rows = score.shape[0]
        chosen = lists.index_select(0, torch.clamp(step, max=len(lists) - 1))[0]
        step.add_(1)
        if rows > len(chosen):  # graphs are captured with more rows than the batch
            chosen = chosen.repeat(-(-rows // len(chosen)), 1)
        if rows not in entries:
            entries[rows] = torch.empty((rows, lists.shape[2]), dtype=torch.int32, device=lists.device)
        # A captured or padded row may be shorter than a list.
        return entries[rows].copy_(torch.where(chosen[:rows] < lengths[:rows, None], chosen[:rows], -1))

    def positions(score, lengths, topk, row_starts=None):
        return fill(score, lengths) if is_first("positions") else entries[score.shape[0]]

    def transform(score, lengths, page_table_size_1, cu_seqlens_q, topk, row_starts=None):
        rows = score.shape[0]
        if is_first("transform"):
            chosen = fill(score, lengths)
            found = torch.gather(page_table_size_1, 1, chosen.clamp_min(0).long())
            if rows not in slots:
                slots[rows] = torch.empty_like(chosen)
            slots[rows].copy_(torch.where(chosen >= 0, found.int(), -1))
        return slots[rows]

    class Replay:
        def play(self, others: torch.Tensor) -> None:
            """Begin at the next forward with the first of other lists, of the same shape."""
            lists.copy_(others)
            step.zero_()

    with (
        mock.patch.object(sgl_kernel, "fast_topk_v2", positions),
        mock.patch.object(sgl_kernel, "fast_topk_transform_fused", transform),
    ):
        yield Replay()
