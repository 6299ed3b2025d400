"""Products of bf16 matrices in float64, rounded once.

On a CPU without bf16 instructions torch's own take ten times as long. And a row's result does not depend on how many rows are
multiplied with it, as it does in float32: batches may be formed differently by servers whose tokens are compared.
"""

import torch
from torch.utils.weak import WeakTensorKeyDictionary

_linear, _bmm = torch.nn.functional.linear, torch.bmm
# A weight, and the version of it that was converted. Writes through `.data` do not count: weights are loaded before they are used.
_converted = WeakTensorKeyDictionary()


def linear(input, weight, bias=None):
    """``torch.nn.functional.linear``; the bias is added before rounding."""
    if not _is_slow(input, weight):
        return _linear(input, weight, bias)
    product = _linear(input.double(), _weight(weight), None if bias is None else bias.double())
    return product.to(input.dtype)


def bmm(input, mat2, *, out=None):
    """``torch.bmm``."""
    if not _is_slow(input, mat2):
        return _bmm(input, mat2) if out is None else _bmm(input, mat2, out=out)
    product = _bmm(input.double(), mat2.double()).to(input.dtype)
    return product if out is None else out.copy_(product)


def install() -> None:
    torch.nn.functional.linear, torch.bmm = linear, bmm


def _is_slow(*tensors) -> bool:
    return all(tensor.dtype == torch.bfloat16 and tensor.device.type == "cpu" for tensor in tensors)


def _weight(weight):
    if not isinstance(weight, torch.nn.Parameter):
        return weight.double()
    # Of a tensor made in inference mode no version is kept; a server loads its weights outside.
    version = None if weight.is_inference() else weight._version
    held = _converted.get(weight)
    if held is None or held[0] != version:
        held = _converted[weight] = version, weight.detach().double()
    return held[1]
