"""Makes the order of the top-k deterministic for a comparison of runs.

The top-k kernels place entries by atomics, so two runs of the same server can hand the attention the same rows in another
order, and the attention then rounds differently. Sorting by position, on both sides, takes that freedom away.
"""

from contextlib import contextmanager
from unittest import mock

import torch


def _sorted(positions: torch.Tensor) -> torch.Tensor:
    """Ascending positions, -1 last."""
    none = torch.iinfo(positions.dtype).max
    ordered = torch.where(positions < 0, none, positions).sort(-1).values
    return torch.where(ordered == none, -1, ordered)


@contextmanager
def deterministic_topk():
    """While open, `sgl_kernel`'s top-k functions return entries in the order of their positions."""
    import sgl_kernel

    fast_topk_v2 = sgl_kernel.fast_topk_v2

    def topk(score, lengths, topk, row_starts=None):
        return _sorted(fast_topk_v2(score, lengths, topk, row_starts=row_starts))

    def transform(score, lengths, page_table_size_1, cu_seqlens_q, topk, row_starts=None):
        positions = _sorted(fast_topk_v2(score, lengths, topk, row_starts=row_starts))
        table = page_table_size_1
        if table.shape[0] != positions.shape[0]:
            counts = (cu_seqlens_q[1:] - cu_seqlens_q[:-1]).long()
            rows = torch.repeat_interleave(torch.arange(len(counts), device=table.device), counts)
            table_rows = rows[: positions.shape[0]]
            slots = table[table_rows[:, None], positions.clamp_min(0).long()]
        else:
            slots = torch.gather(table, 1, positions.clamp_min(0).long())
        return torch.where(positions >= 0, slots.int(), -1)

    with (
        mock.patch.object(sgl_kernel, "fast_topk_v2", topk),
        mock.patch.object(sgl_kernel, "fast_topk_transform_fused", transform),
    ):
        yield
