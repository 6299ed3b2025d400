"""Attention: over selected latent KV rows (FlashMLA sparse, FlashMLA kv, fa3) and dense over short prefills."""

import torch

from sgl_cpu_ref.quant import dequantize_rows

GATHER_ROWS = 4096
"""Rows gathered at a time: about nine megabytes in fp32, so that they stay in cache."""


def sparse_mla(
    q_all: torch.Tensor, kv_cache: torch.Tensor, indices: torch.Tensor, sm_scale: float, d_v: int
) -> torch.Tensor:
    """Each query attends to the rows its indices name.

    Args:
        q_all: bf16 [T, H, 576]. kv_cache: bf16 [S, 1, 576] or packed [S, 1, 656], flat by slot.
        indices: int [T, topk] slots, -1 for none. d_v: leading values of a row that serve as its value vector.

    Returns:
        [T, H, d_v] of q's dtype; zeros for a query without rows.
    """
    tokens, heads, _ = q_all.shape
    flat = kv_cache.reshape(-1, kv_cache.shape[-1])
    out = torch.zeros(tokens, heads, d_v, dtype=q_all.dtype)
    step = max(1, GATHER_ROWS // indices.shape[1])
    for start in range(0, tokens, step):
        part = slice(start, start + step)
        index = indices[part].long()
        chosen = index >= 0
        kv = flat[index.clamp_min(0)]
        kv = kv.float() if kv.dtype == torch.bfloat16 else dequantize_rows(kv)
        score = torch.bmm(q_all[part].float(), kv.transpose(1, 2)) * sm_scale
        score = score.masked_fill(~chosen[:, None, :], float("-inf"))
        if not chosen.all():
            # A hole is read from slot 0, whose bytes may be anything: zero times NaN is NaN.
            kv = kv.masked_fill(~chosen[:, :, None], 0.0)
        prob = torch.nan_to_num(torch.softmax(score, -1))
        out[part] = torch.bmm(prob, kv[..., :d_v]).to(out.dtype)
    return out


def varlen_mha(q, k, v, cu_q, cu_k, scale: float) -> torch.Tensor:
    """Causal attention of packed sequences, the last query of each aligned with its last key.

    q [Tq, H, D], k [Tk, H, D], v [Tk, H, Dv] floats; cu_q, cu_k int [B + 1]. Returns [Tq, H, Dv] of q's dtype.
    """
    out = q.new_zeros(q.shape[0], q.shape[1], v.shape[-1])
    for i in range(len(cu_q) - 1):
        q0, q1, k0, k1 = int(cu_q[i]), int(cu_q[i + 1]), int(cu_k[i]), int(cu_k[i + 1])
        queries, keys = q1 - q0, k1 - k0
        score = torch.einsum("qhd,khd->hqk", q[q0:q1].float(), k[k0:k1].float()) * scale
        future = torch.arange(keys)[None] > (torch.arange(queries)[:, None] + keys - queries)
        prob = score.masked_fill(future, float("-inf")).softmax(-1)
        out[q0:q1] = torch.einsum("hqk,khd->qhd", prob, v[k0:k1].float()).to(out.dtype)
    return out
