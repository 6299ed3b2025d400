"""Rotary embedding of DeepSeek (YaRN)."""

import torch


def deepseek_rope(self, positions, query, key, offsets=None):
    """``DeepseekScalingRotaryEmbedding.forward_native``, whose neox branch repeats the wrong axis for 1-D positions.

    positions int [T]; query [T, (Hq,) D] and key [T, (Hk,) D] floats, of which the first ``rotary_dim`` are rotated in
    fp32. Returns both in their own dtype and shape.
    """
    table = self.cos_sin_cache[positions if offsets is None else positions + offsets]
    cos, sin = table.chunk(2, -1)
    if self.is_neox_style:
        cos, sin = torch.cat([cos, cos], -1), torch.cat([sin, sin], -1)
    else:
        cos, sin = cos.repeat_interleave(2, -1), sin.repeat_interleave(2, -1)
    cos, sin = cos.unsqueeze(-2), sin.unsqueeze(-2)

    def rotate(x: torch.Tensor) -> torch.Tensor:
        flat = x.float().reshape(x.shape[0], -1, x.shape[-1])
        turned, passed = flat[..., : self.rotary_dim], flat[..., self.rotary_dim :]
        if self.is_neox_style:
            first, second = turned.chunk(2, -1)
            cross = torch.cat([-second, first], -1)
        else:
            cross = torch.stack([-turned[..., 1::2], turned[..., 0::2]], -1).flatten(-2)
        return torch.cat([turned * cos + cross * sin, passed], -1).to(x.dtype).view(x.shape)

    return rotate(query.contiguous()), rotate(key.contiguous())
