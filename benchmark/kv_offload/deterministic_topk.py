"""Makes the top-k deterministic for a comparison of runs.

The top-k kernels place entries by atomics: two runs of the same server can hand the attention the same rows in another order,
and where scores tie at the boundary, other rows. Both change rounding, then tokens. Here ties go to the lowest position and
entries stand in the order of their positions, on both sides of a comparison.
"""

from contextlib import contextmanager
from unittest import mock

import torch


def exact_topk(score, lengths, topk, row_starts=None):
    """``[M, topk]`` int32 positions relative to a row's start, ascending, -1 last; safe inside a CUDA graph."""
    rows, columns = score.shape
    column = torch.arange(columns, device=score.device)
    start = torch.zeros(rows, 1, device=score.device, dtype=torch.int64)
    if row_starts is not None:
        start = row_starts[:rows, None].long()
    valid = (column >= start) & (column < start + lengths[:rows, None])
    score = score.masked_fill(~valid, float("-inf"))
    k = min(topk, columns)
    threshold = score.topk(k, dim=-1, sorted=False).values.amin(-1, keepdim=True)
    above, tied = score > threshold, (score == threshold) & valid
    room = k - above.sum(-1, keepdim=True, dtype=torch.int32)
    chosen = above | (tied & (tied.cumsum(-1, dtype=torch.int32) <= room))
    place = torch.where(chosen, chosen.cumsum(-1, dtype=torch.int32) - 1, topk)
    out = torch.full((rows, topk + 1), -1, dtype=torch.int32, device=score.device)
    out.scatter_(1, place.long(), (column - start).int().expand(rows, columns))
    return out[:, :topk].contiguous()


@contextmanager
def deterministic_topk():
    """While open, `sgl_kernel`'s top-k functions are deterministic."""
    import sgl_kernel

    def transform(score, lengths, page_table_size_1, cu_seqlens_q, topk, row_starts=None):
        positions = exact_topk(score, lengths, topk, row_starts)
        table = page_table_size_1
        if table.shape[0] != positions.shape[0]:
            counts = (cu_seqlens_q[1:] - cu_seqlens_q[:-1]).long()
            rows = torch.repeat_interleave(torch.arange(len(counts), device=table.device), counts)
            slots = table[rows[: positions.shape[0], None], positions.clamp_min(0).long()]
        else:
            slots = torch.gather(table, 1, positions.clamp_min(0).long())
        return torch.where(positions >= 0, slots.int(), -1)

    with (
        mock.patch.object(sgl_kernel, "fast_topk_v2", exact_topk),
        mock.patch.object(sgl_kernel, "fast_topk_transform_fused", transform),
    ):
        yield
