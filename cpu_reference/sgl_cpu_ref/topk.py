"""Top-k selection; stands in for ``sgl_kernel``'s fast_topk family.

Unlike the CUDA kernels, these are deterministic: equal scores go to the lowest position, and the indices come out in
ascending order with -1 last. The same context therefore gives the same row of indices in any batch.
"""

from typing import Optional

import torch


def _ordered_int(score: torch.Tensor) -> torch.Tensor:
    """fp32 to int64 of the same order (-0.0 counts as 0.0)."""
    bits = (score + 0.0).view(torch.int32).long()
    return torch.where(bits < 0, -(bits & 0x7FFFFFFF), bits)


def fast_topk_v2(
    score: torch.Tensor, lengths: torch.Tensor, topk: int, row_starts: Optional[torch.Tensor] = None
) -> torch.Tensor:
    """Positions of the ``topk`` largest scores in each row.

    Args:
        score: fp32 [M, N], N < 2**24. lengths: int [>= M]; row_starts: int [>= M] or None for zeros. Only columns in
            [start, start + length) of a row compete.

    Returns:
        int32 [M, topk], relative to the row's start, ascending, -1 past the row's length.
    """
    rows, cols = score.shape
    assert cols < 1 << 24, cols
    lengths = lengths[:rows].long()
    starts = torch.zeros_like(lengths) if row_starts is None else row_starts[:rows].long()
    col = torch.arange(cols)
    inside = (col >= starts[:, None]) & (col < (starts + lengths)[:, None])
    k = min(topk, cols)
    key = (_ordered_int(score.masked_fill(~inside, float("-inf"))) << 24) - col
    best = key.topk(k, dim=-1)[1]
    valid = torch.gather(inside, 1, best)
    best = torch.where(valid, best - starts[:, None], cols).sort(-1)[0]
    out = torch.full((rows, topk), -1, dtype=torch.int32)
    out[:, :k] = torch.where(best < cols, best, -1).int()
    return out


def fast_topk_transform_fused(
    score, lengths, page_table_size_1, cu_seqlens_q, topk, row_starts=None
) -> torch.Tensor:
    """`fast_topk_v2`, then each position looked up in its request's row of the page table.

    Args:
        page_table_size_1: int [M or B, L] slots by position. cu_seqlens_q: int [B + 1], read where the table has one row
            a request rather than one a query.

    Returns:
        int32 [M, topk] slots, -1 kept.
    """
    index = fast_topk_v2(score, lengths, topk, row_starts)
    table = page_table_size_1
    if table.shape[0] != index.shape[0]:
        count = (cu_seqlens_q[1:] - cu_seqlens_q[:-1]).long()
        table = table[torch.repeat_interleave(torch.arange(len(count)), count)[: index.shape[0]]]
    slots = torch.gather(table.int(), 1, index.clamp_min(0).long())
    return torch.where(index >= 0, slots, -1)


def fast_topk_transform_ragged_fused(score, lengths, topk_indices_offset, topk, row_starts=None) -> torch.Tensor:
    """`fast_topk_v2`, then ``topk_indices_offset`` int [>= M] added to each row; int32 [M, topk], -1 kept."""
    index = fast_topk_v2(score, lengths, topk, row_starts)
    return torch.where(index >= 0, index + topk_indices_offset[: index.shape[0], None].int(), -1)
