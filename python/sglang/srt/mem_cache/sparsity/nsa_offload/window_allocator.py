"""Device windows: which slots of the device KV buffer a running request owns."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from sglang.srt.mem_cache.sparsity.nsa_offload.sizing import OffloadSizes


class Window(NamedTuple):
    """A run of device slots owned by one request row.

    Attributes:
        index: row of the residency tables.
        first_slot: device slot of window offset 0.
    """

    index: int
    first_slot: int


@dataclass
class Lease:
    """A request row's hold on a window, from its first decode step to the row's ``free``.

    Attributes:
        window: the device slots.
        first_position: first position that decoding writes; earlier ones are on the host.
        end_position: positions before it are on the host, or their copy has been issued.
    """

    window: Window
    first_position: int
    end_position: int


class SparseSlotAllocator:
    """Hands out contiguous device slots, a window at a time, on the CPU.

    Windows have one fixed size and there is one for each request that may run, so allocation
    fails only by a fault.
    """

    def __init__(self, sizes: OffloadSizes):
        self._sizes = sizes
        self._free = list(range(sizes.num_windows - 1, -1, -1))

    @property
    def num_free(self) -> int:
        return len(self._free)

    @property
    def num_windows(self) -> int:
        return self._sizes.num_windows

    def alloc_contiguous(self) -> Window:
        """Take a window.

        Raises:
            RuntimeError: none is free, so more requests run than windows were sized for.
        """
        if not self._free:
            raise RuntimeError(
                f"No device window is free: all {self.num_windows} are owned. More requests "
                "decode than --max-running-requests allows."
            )
        index = self._free.pop()
        slots = self._sizes
        return Window(index, slots.first_window_slot + index * slots.window_slots)

    def free(self, window: Window) -> None:
        """Give a window back. Work already queued on the forward stream may still use it."""
        if window.index in self._free:
            raise RuntimeError(f"Window {window.index} is freed twice.")
        self._free.append(window.index)
