"""Small lists that the scheduler's thread sends to the device without waiting for it."""

from __future__ import annotations

from typing import Sequence

import torch


def upload(values: Sequence, device: torch.device) -> torch.Tensor:
    """Integers as an int64 tensor on the device, in the order of the current stream.

    They go through pinned memory, which torch keeps until the copy is done. A copy of pageable
    memory would stop the CPU until the stream has done all that was queued before.

    Args:
        values: integers, or lists of them of one length.
        device: of the tensor.
    """
    on_gpu = torch.device(device).type != "cpu"
    return torch.tensor(values, dtype=torch.int64, pin_memory=on_gpu).to(device, non_blocking=True)
