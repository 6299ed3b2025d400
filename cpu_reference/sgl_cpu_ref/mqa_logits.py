"""Index logits; this module stands in for ``deep_gemm`` in SGLang's indexer, so function names are deep_gemm's.

A row's logits do not depend on how many rows or keys share the call, nor on the machine: BLAS sums in another order for other
shapes and instruction sets, and greedy output must not change with either. So what is summed is summed in float64: there the products
of fp8 values are exact in any order, and heads are added one by one.
"""

import torch

from sgl_cpu_ref.index_buffer import split_pages
from sgl_cpu_ref.quant import FP8

ROW_TILE = 128
"""Rows of a product at a time: a score is eight bytes for each head and key."""


def get_num_sms() -> int:
    """Streaming multiprocessors of an H100; used upstream only to make a schedule, which is not read here."""
    return 132


def get_paged_mqa_logits_metadata(context_lens, block_size, num_sms) -> None:
    """No schedule is needed."""
    return None


def mqa_logits(q: torch.Tensor, k: torch.Tensor, k_scale: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    """``sum_h weights[m, h] * relu(q[m, h] . (k[n] * k_scale[n]))``.

    q fp8 [M, H, D], k fp8 [N, D], k_scale fp32 [N], weights fp32 [M, H]; returns fp32 [M, N].
    """
    rows, heads, dim = q.shape
    keys, scale, weight = k.double().T, k_scale.double(), weights.double()
    out = torch.empty(rows, k.shape[0])
    for start in range(0, rows, ROW_TILE):
        part = slice(start, start + ROW_TILE)
        score = (q[part].double().reshape(-1, dim) @ keys).view(-1, heads, k.shape[0])
        score = torch.relu(score).mul_(scale)
        total = weight[part, 0, None] * score[:, 0]
        for head in range(1, heads):
            total += weight[part, head, None] * score[:, head]
        out[part] = total.float()
    return out


def fp8_mqa_logits(q, kv, weights, ks, ke, clean_logits=True, **kwargs) -> torch.Tensor:
    """Logits of ragged prefill: q fp8 [M, H, D], kv = (fp8 [N, D], fp32 [N]); returns fp32 [M, N].

    Columns outside [ks, ke) are left as computed: the caller's top-k masks them by row start and length.
    """
    k, k_scale = kv
    return mqa_logits(q, k, k_scale, weights)


def fp8_paged_mqa_logits(
    q, kv, weights, ctx_lens, block_tables, schedule, max_len, clean_logits=True, **kwargs
) -> torch.Tensor:
    """Logits of decode over the paged index-key buffer.

    Args:
        q: fp8 [B, next_n, H, D]. kv: uint8 [pages, page_size, 1, D + 4]. weights: fp32 [B * next_n, H].
        ctx_lens: int [B] or [B, next_n]. block_tables: int [B, blocks].

    Returns:
        fp32 [B * next_n, max_len], -inf at and past each context's end.
    """
    batch, next_n, _, dim = q.shape
    pages, page_size = kv.shape[:2]
    keys, scales = split_pages(kv.reshape(pages, -1), page_size, dim)
    out = torch.full((batch * next_n, max_len), float("-inf"))
    for b in range(batch):
        length = int(ctx_lens.reshape(batch, -1)[b, -1])
        if length <= 0:
            continue
        page = block_tables[b, : -(-length // page_size)].long()
        k = keys[page].reshape(-1, dim)[:length].view(FP8)
        s = scales[page].reshape(-1, 4)[:length].contiguous().view(torch.float32).squeeze(-1)
        rows = slice(b * next_n, (b + 1) * next_n)
        out[rows, :length] = mqa_logits(q[b], k, s, weights[rows])
    return out


def linear_fp32(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """``x @ weight.T`` in float64, rounded once to fp32; x float [M, K], weight float [N, K]."""
    return (x.double() @ weight.double().t()).float()
