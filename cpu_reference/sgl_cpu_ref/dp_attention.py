"""DP attention over gloo: what SGLang has for CUDA only between data-parallel ranks."""

from unittest import mock

import torch

_tensor = torch.tensor


def tensor(*args, pin_memory=False, **more):
    """``torch.tensor``; without a GPU no memory is pinned, and SGLang pins its lists of token counts."""
    return _tensor(*args, **more)


def memcpy(dst, src, dim, offset, sz, offset_src: bool) -> None:
    """Copy ``sz`` rows, from row ``offset`` of the source on or to row ``offset`` of the target on; both are int [1]."""
    begin, rows = int(offset), int(sz)
    if offset_src:
        dst[:rows] = src[begin : begin + rows]
    else:
        dst[begin : begin + rows] = src[:rows]


def create_idle_input(original):
    """``EagleVerifyInput.create_idle_input``, whose empty tensors SGLang makes on a CUDA device."""

    def on_cpu(make):
        return lambda *args, device=None, **more: make(*args, device="cpu", **more)

    def create(*args, **more):
        with mock.patch.multiple(torch, empty=on_cpu(torch.empty), full=on_cpu(torch.full)):
            return original(*args, **more)

    return create


def install() -> None:
    from sgl_cpu_ref.patching import replace_everywhere, replace_static
    from sglang.srt.distributed.parallel_state import GroupCoordinator
    from sglang.srt.speculative.eagle_info import EagleVerifyInput

    torch.tensor = tensor
    replace_everywhere("sglang.srt.layers.dp_attention", "memcpy_triton", memcpy)
    replace_static(EagleVerifyInput, "create_idle_input", create_idle_input(EagleVerifyInput.create_idle_input))
    # Both are custom ops that are registered for CUDA.
    GroupCoordinator.all_gather_into_tensor = GroupCoordinator._all_gather_into_tensor
    GroupCoordinator.reduce_scatter_tensor = GroupCoordinator._reduce_scatter_tensor
