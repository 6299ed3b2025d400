"""Hadamard transform of the indexer's queries and keys."""

import functools

import torch


@functools.lru_cache(maxsize=None)
def hadamard_matrix(n: int) -> torch.Tensor:
    """The n x n Sylvester matrix of +1 and -1, float64; n is a power of two."""
    assert n > 0 and n & (n - 1) == 0, n
    h = torch.ones(1, 1, dtype=torch.float64)
    while h.size(0) < n:
        h = torch.cat([torch.cat([h, h], 1), torch.cat([h, -h], 1)], 0)
    return h


def hadamard_transform(x: torch.Tensor, scale: float = 1.0) -> torch.Tensor:
    """``scale * (x @ H)`` over the last dimension; stands in for ``sglang.jit_kernel.hadamard.hadamard_transform``.

    x is float [..., n]; the product is float64, so that a row does not depend on the others, and the result has x's dtype.
    """
    return ((x.double() @ hadamard_matrix(x.size(-1))) * scale).to(x.dtype)
