"""Working copies of the sgl_kernel KV transfer ops that SGLang's host pools call, for memory that is all host memory.

Signatures are those of ``sgl_kernel.kvcacheio``. Indices are int [N] on the CPU; rows that no index names are untouched.
Layouts: *lf* (layer first) is one tensor a layer, [slots, ...]; *pf* (page first) is [slots, layers, ...], or for the
``direct`` functions [pages, layers, page_size, ...]. Other functions raise NotImplementedError when called.
"""

import ctypes

import numpy as np
import torch


def _rows(tensor: torch.Tensor) -> torch.Tensor:
    """uint8 view [rows, bytes of a row]."""
    return tensor.reshape(tensor.shape[0], -1).view(torch.uint8)


def _rows_at(address: int, rows: int, row_bytes: int) -> torch.Tensor:
    """uint8 view [rows, row_bytes] of the memory at ``address``."""
    memory = (ctypes.c_uint8 * (rows * row_bytes)).from_address(int(address))
    return torch.from_numpy(np.ctypeslib.as_array(memory)).view(rows, row_bytes)


def transfer_kv_per_layer_mla(src, dst, src_indices, dst_indices, item_size, **kwargs) -> None:
    """Rows of one layer: ``dst[dst_indices] = src[src_indices]``, in any dtype of equal row size."""
    _rows(dst)[dst_indices] = _rows(src)[src_indices]


def transfer_kv_all_layer_mla(
    src_layers, dst_layers, src_indices, dst_indices, item_size, num_layers, **kwargs
) -> None:
    """Rows of every layer, lf to lf; ``*_layers`` hold one address a layer, ``item_size`` is the row's bytes."""
    if src_indices.numel() == 0:
        return
    src_rows, dst_rows = int(src_indices.max()) + 1, int(dst_indices.max()) + 1
    for src, dst in zip(src_layers.tolist(), dst_layers.tolist()):
        _rows_at(dst, dst_rows, item_size)[dst_indices] = _rows_at(src, src_rows, item_size)[src_indices]


def transfer_kv_all_layer_mla_lf_pf(
    src_layers, dst, src_indices, dst_indices, item_size, dst_layout_dim, num_layers, **kwargs
) -> None:
    """Rows of every layer, lf (addresses) to pf."""
    if src_indices.numel() == 0:
        return
    src_rows = int(src_indices.max()) + 1
    out = dst.reshape(dst.shape[0], num_layers, -1).view(torch.uint8)
    for layer, src in enumerate(src_layers.tolist()):
        out[dst_indices, layer] = _rows_at(src, src_rows, item_size)[src_indices]


def transfer_kv_per_layer_mla_pf_lf(
    src, dst, src_indices, dst_indices, layer_id, item_size, src_layout_dim, **kwargs
) -> None:
    """Rows of one layer, pf to lf."""
    _rows(dst)[dst_indices] = src[:, layer_id].reshape(src.shape[0], -1).view(torch.uint8)[src_indices]


def transfer_kv_direct(src_layers, dst_layers, src_indices, dst_indices, page_size) -> None:
    """Rows of every layer, lists of tensors to lists of tensors."""
    for src, dst in zip(src_layers, dst_layers):
        dst[dst_indices] = src[src_indices]


def transfer_kv_all_layer_direct_lf_pf(src_ptrs, dst_ptrs, src_indices, dst_indices, page_size) -> None:
    """Whole pages of every layer, lf to pf; indices come page by page, each page's slots in order."""
    out = dst_ptrs[0]
    for layer, src in enumerate(src_ptrs):
        out[dst_indices[::page_size] // page_size, layer] = src[src_indices].view(-1, page_size, *src.shape[1:])


def transfer_kv_per_layer_direct_pf_lf(src_ptrs, dst_ptrs, src_indices, dst_indices, layer_id, page_size) -> None:
    """Whole pages of one layer, pf to lf."""
    src, dst = src_ptrs[0], dst_ptrs[0]
    dst[dst_indices] = src[src_indices[::page_size] // page_size, layer_id].reshape(-1, *dst.shape[1:])


def __getattr__(name: str):
    if name.startswith("__"):
        raise AttributeError(name)

    def missing(*args, **kwargs):
        raise NotImplementedError(f"sgl_kernel.kvcacheio.{name} has no CPU copy")

    missing.__name__ = name
    return missing
