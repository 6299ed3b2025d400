"""Quantisation of activations, index keys and latent KV rows.

A packed fp8 KV row has 656 bytes: 512 fp8 values | 4 fp32 scales (one for each 128 values) | 64 bf16 rope values.
"""

from typing import Optional, Tuple

import torch

FP8 = torch.float8_e4m3fn
FP8_MAX = 448.0

NOPE_DIM = 512
ROPE_DIM = 64
TILE = 128
SCALE_END = NOPE_DIM + 4 * (NOPE_DIM // TILE)
ROW_BYTES = SCALE_END + 2 * ROPE_DIM


def act_quant(
    x: torch.Tensor, block_size: int = 128, scale_fmt: Optional[str] = None
) -> Tuple[torch.Tensor, torch.Tensor]:
    """Block-wise fp8 quantisation; stands in for ``nsa.triton_kernel.act_quant``.

    Args:
        x: float [..., D], contiguous, D a multiple of ``block_size``.
        scale_fmt: any value but None rounds the scales up to powers of two.

    Returns:
        fp8 [..., D] and fp32 scales [..., D / block_size].
    """
    assert x.is_contiguous() and x.size(-1) % block_size == 0
    groups = x.float().unflatten(-1, (-1, block_size))
    scale = groups.abs().amax(-1).clamp_min(1e-4) * (1.0 / FP8_MAX)
    if scale_fmt is not None:
        scale = torch.exp2(torch.ceil(torch.log2(scale)))
    values = (groups / scale.unsqueeze(-1)).clamp(-FP8_MAX, FP8_MAX)
    return values.flatten(-2).to(FP8), scale


def quantize_k_cache_separate(
    k_nope: torch.Tensor, k_rope: torch.Tensor, tile_size: int = TILE
) -> Tuple[torch.Tensor, torch.Tensor]:
    """Packs latent KV; stands in for ``nsa.quant_k_cache.quantize_k_cache_separate``.

    Args:
        k_nope: bf16 [N, (1,) 512]. k_rope: bf16 [N, (1,) 64].

    Returns:
        uint8 [N, 1, 528] (values and scales) and uint8 [N, 1, 128] (rope bytes).
    """
    tiles = k_nope.reshape(-1, NOPE_DIM // tile_size, tile_size).float()
    scale = tiles.abs().amax(-1) / FP8_MAX
    values = (tiles / scale.unsqueeze(-1)).nan_to_num(0).to(FP8).flatten(-2)
    nope = torch.cat([values.view(torch.uint8), scale.contiguous().view(torch.uint8)], -1)
    rope = k_rope.reshape(-1, ROPE_DIM).contiguous().view(torch.uint8)
    return nope.unsqueeze(1), rope.unsqueeze(1)


def dequantize_rows(rows: torch.Tensor) -> torch.Tensor:
    """Packed rows [..., 656] of any one-byte dtype to fp32 [..., 576]."""
    raw = rows.view(torch.uint8)
    nope = raw[..., :NOPE_DIM].contiguous().view(FP8).float().unflatten(-1, (-1, TILE))
    scale = raw[..., NOPE_DIM:SCALE_END].contiguous().view(torch.float32)
    rope = raw[..., SCALE_END:ROW_BYTES].contiguous().view(torch.bfloat16).float()
    return torch.cat([(nope * scale.unsqueeze(-1)).flatten(-2), rope], -1)


def dequantize_k_cache_paged(
    quant_k_cache: torch.Tensor, page_table_1_flattened: torch.Tensor, group_size: int = TILE
) -> torch.Tensor:
    """Gathers and unpacks rows; stands in for ``nsa.dequant_k_cache.dequantize_k_cache_paged``.

    Args:
        quant_k_cache: packed [S, 1, 656], flat by slot. page_table_1_flattened: int [N] slots.

    Returns:
        bf16 [N, 1, 576].
    """
    flat = quant_k_cache.reshape(-1, quant_k_cache.shape[-1])
    rows = flat[page_table_1_flattened.long()]
    return dequantize_rows(rows).to(torch.bfloat16).unsqueeze(1)
