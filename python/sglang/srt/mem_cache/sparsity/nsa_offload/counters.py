"""Reads the hit counters of the GPU without waiting for it."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple, Optional

import torch

if TYPE_CHECKING:
    from sglang.srt.mem_cache.sparsity.nsa_offload.controller import SparseCacheController


class CounterSample(NamedTuple):
    """The counters as they stood after the forwards launched before ``time``.

    Attributes:
        time: seconds, of the clock the caller reads.
        counts: per layer the sums of LRU hits, ring hits and misses since the start.
    """

    time: float
    counts: list[list[int]]

    @property
    def misses(self) -> int:
        """Misses of all layers: rows copied from the host."""
        return sum(layer[2] for layer in self.counts)


class CounterSampler:
    """Copies ``LRUCacheState.counters`` to the host, one interval late.

    Each ``poll`` takes the copy that the one before has queued, if the GPU is past it, and
    queues the next; neither waits. The counters are never reset, so a copy that comes late
    loses nothing.

    Args:
        counters: ``[L, 3]`` int64 on the device.
        controller: orders the copy after the forwards launched so far.

    Attributes:
        latest, previous: the last two samples; None before they are there.
    """

    def __init__(self, counters: torch.Tensor, controller: "SparseCacheController"):
        self._counters = counters
        self._controller = controller
        self._landing = torch.empty_like(
            counters, device="cpu", pin_memory=counters.device.type != "cpu"
        )
        self._pending: Optional[tuple[float, torch.Event]] = None
        self.latest: Optional[CounterSample] = None
        self.previous: Optional[CounterSample] = None

    def poll(self, now: float) -> None:
        """Take what has arrived and ask for more; call at each log interval."""
        if self._pending is not None:
            time, event = self._pending
            # The landing buffer belongs to the copy until its event says so.
            if not event.query():
                return
            self.previous = self.latest
            self.latest = CounterSample(time, self._landing.tolist())
        event = self._controller.copy_after_forward(self._landing, self._counters)
        self._pending = (now, event)
