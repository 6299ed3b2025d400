"""Host memory for requests that a decode node retracts: how much there is, and who has it.

A retracted request gives its host slots to others, so its rows and index keys are copied to
pageable memory until it gets slots again. A colocated server prefills it again, and copies nothing.
"""

from __future__ import annotations

import weakref
from dataclasses import dataclass
from typing import Optional

import torch

from sglang.srt.mem_cache.memory_pool import CPUCopyRefused
from sglang.srt.mem_cache.sparsity.nsa_offload.config import CONFIG_FLAG

# Of the host pool. Under pressure a decode node retracts a few of its requests, seldom many.
DEFAULT_SHARE = 0.05


@dataclass(eq=False)
class SavedRequest:
    """What a retracted request had; on the CPU.

    Attributes:
        rows: ``[layer_num, pages, page bytes]`` uint8, latent KV.
        index_keys: per layer ``[pages, ...]``, as in the pool.
    """

    rows: torch.Tensor
    index_keys: list[torch.Tensor]


class RetractionMemory:
    """Counts the bytes of saved requests. It owns none: they live as long as their request has them.

    SGLang drops a saved request when it has its slots again, or was aborted. All ranks do so in
    the same call, and sizes are equal, so all of them refuse the same requests.

    Args:
        total: bytes.
    """

    def __init__(self, total: int):
        self.total = total
        self.used = 0

    def check(self, num_bytes: int, num_tokens: int) -> None:
        """Whether a request of so many bytes may be saved.

        Raises:
            CPUCopyRefused: it would not fit; names what it needs and the setting.
        """
        left = self.total - self.used
        if num_bytes > left:
            raise CPUCopyRefused(
                f"its {num_tokens} tokens take {num_bytes / 1e9:.6f} GB of host memory, and of "
                f"{self.total / 1e9:.6f} GB for retracted requests {left / 1e9:.6f} are free. "
                f"Raise retract_size_gb in {CONFIG_FLAG}, or lower --max-running-requests."
            )

    def count(self, saved: SavedRequest, num_bytes: int) -> None:
        """Count a saved request until nobody has it."""
        self.used += num_bytes
        weakref.finalize(saved, self._give_back, num_bytes).atexit = False

    def _give_back(self, num_bytes: int) -> None:
        self.used -= num_bytes


def retraction_bytes(asked_gb: Optional[float], pool_bytes: int, request_bytes: int) -> int:
    """Host bytes that one rank's retracted requests may take.

    Args:
        asked_gb: ``retract_size_gb``; None for a share of the pool that holds one request.
        pool_bytes: of the host pool.
        request_bytes: of the longest request, saved.
    """
    if asked_gb is not None:
        return int(asked_gb * 1e9)
    return max(int(pool_bytes * DEFAULT_SHARE), request_bytes)


def pool_bytes_beside(host_bytes: float, asked_gb: Optional[float], request_bytes: int) -> float:
    """Largest host pool that fits together with ``retraction_bytes``; below 0 if none does."""
    if asked_gb is not None:
        return host_bytes - asked_gb * 1e9
    return min(host_bytes / (1 + DEFAULT_SHARE), host_bytes - request_bytes)
