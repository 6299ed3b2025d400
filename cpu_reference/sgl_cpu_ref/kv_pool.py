"""Reads and writes of the latent KV pool; stands in for the Triton kernels of ``mem_cache.utils``."""

import torch


def set_mla_kv_buffer(kv_buffer: torch.Tensor, loc: torch.Tensor, nope: torch.Tensor, rope: torch.Tensor) -> None:
    """Writes rows in place.

    kv_buffer [S, 1, D]; loc int [N]; nope and rope [N, 1, *] whose widths add up to D. A nope of another dtype of the
    same size (packed fp8 bytes) is stored bit for bit.
    """
    width = nope.shape[-1]
    rows = nope.reshape(-1, 1, width)
    kv_buffer[loc, :, :width] = rows if nope.dtype == kv_buffer.dtype else rows.view(kv_buffer.dtype)
    kv_buffer[loc, :, width:] = rope.reshape(-1, 1, rope.shape[-1]).to(kv_buffer.dtype)


def get_mla_kv_buffer(kv_buffer: torch.Tensor, loc: torch.Tensor, nope: torch.Tensor, rope: torch.Tensor) -> None:
    """Reads rows ``loc`` int [N] of kv_buffer [S, 1, D] into ``nope`` and ``rope``, in place."""
    width = nope.shape[-1]
    rows = kv_buffer[loc]
    nope.copy_(rows[..., :width].view_as(nope))
    rope.copy_(rows[..., width:].view_as(rope))
