"""Reads and writes of the paged index-key buffer; stands in for the Triton halves of ``nsa.index_buf_accessor``.

A page is one uint8 row of ``page_size * (dim + 4)`` bytes: first ``page_size`` fp8 keys of ``dim`` bytes, then
``page_size`` fp32 scales. Slot s lies in page ``s // page_size`` at offset ``s % page_size``. ``pool`` is any object
with ``page_size`` and ``index_head_dim``.
"""

from typing import Tuple

import torch

SCALE_BYTES = 4


def split_pages(buf: torch.Tensor, page_size: int, dim: int) -> Tuple[torch.Tensor, torch.Tensor]:
    """Views of uint8 pages [P, page_size * (dim + 4)]: keys [P, page_size, dim] and scale bytes [P, page_size, 4]."""
    pages = buf.shape[0]
    keys = buf[:, : page_size * dim].view(pages, page_size, dim)
    scales = buf[:, page_size * dim :].view(pages, page_size, SCALE_BYTES)
    return keys, scales


def set_k_and_s(pool, buf, loc, index_k, index_k_scale) -> None:
    """Writes keys fp8 [N, dim] and scales fp32 [N(, 1)] at slots ``loc`` int [N], in place; N may be zero."""
    if loc.numel() == 0:
        return
    keys, scales = split_pages(buf, pool.page_size, pool.index_head_dim)
    page, offset = loc // pool.page_size, loc % pool.page_size
    keys[page, offset] = index_k.view(torch.uint8)
    scales[page, offset] = index_k_scale.reshape(-1, 1).contiguous().view(torch.uint8)


def _read(pages: torch.Tensor, page_size: int, seq_len: int, page_indices: torch.Tensor) -> torch.Tensor:
    count = -(-seq_len // page_size)
    return pages[page_indices[:count].long()].reshape(-1, pages.shape[-1])[:seq_len]


def get_k(pool, buf, seq_len, page_indices) -> torch.Tensor:
    """Keys of one sequence, uint8 [seq_len, dim]; ``page_indices`` int [>= pages of the sequence]."""
    keys, _ = split_pages(buf, pool.page_size, pool.index_head_dim)
    return _read(keys, pool.page_size, int(seq_len), page_indices)


def get_s(pool, buf, seq_len, page_indices) -> torch.Tensor:
    """Scale bytes of one sequence, uint8 [seq_len, 4]."""
    _, scales = split_pages(buf, pool.page_size, pool.index_head_dim)
    return _read(scales, pool.page_size, int(seq_len), page_indices)


def get_k_and_s(
    pool, buf, page_indices, seq_len_tensor, seq_len_sum, max_seq_len
) -> Tuple[torch.Tensor, torch.Tensor]:
    """Keys and scale bytes of a batch, one sequence after the other.

    Args:
        page_indices: int [B, pages]. seq_len_tensor: int [B], whose sum is ``seq_len_sum``.

    Returns:
        uint8 [seq_len_sum, dim] and uint8 [seq_len_sum, 4].
    """
    lengths = seq_len_tensor.tolist()
    keys = [get_k(pool, buf, n, page_indices[i]) for i, n in enumerate(lengths)]
    scales = [get_s(pool, buf, n, page_indices[i]) for i, n in enumerate(lengths)]
    return torch.cat(keys), torch.cat(scales)
