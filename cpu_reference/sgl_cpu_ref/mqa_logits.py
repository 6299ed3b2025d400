"""Index logits; this module stands in for ``deep_gemm`` in SGLang's indexer, so function names are deep_gemm's.

Every product is padded to a fixed tile, so that a row's logits do not depend on how many rows or keys share the call:
BLAS picks other summation orders for other shapes, and greedy output must not change with the batch.
"""

import torch
import torch.nn.functional as F

from sgl_cpu_ref.index_buffer import split_pages
from sgl_cpu_ref.quant import FP8

KEY_TILE = 64
ROW_TILE = 128


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
    count = k.shape[0]
    keys = F.pad(k.float() * k_scale.unsqueeze(-1), (0, 0, 0, -count % KEY_TILE))
    out = torch.empty(rows, count)
    for start in range(0, rows, ROW_TILE):
        part = slice(start, start + ROW_TILE)
        score = torch.relu(q[part].float().reshape(-1, dim) @ keys.T).view(-1, heads, keys.shape[0])
        out[part] = torch.bmm(weights[part].float().unsqueeze(1), score).squeeze(1)[:, :count]
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
    """``x @ weight.T`` in fp32; x float [M, K], weight float [N, K].

    Eight rows of padding keep a single row off BLAS's matrix-vector path, which sums in another order.
    """
    return (F.pad(x.float(), (0, 0, 0, 8)) @ weight.float().t())[: x.shape[0]]
