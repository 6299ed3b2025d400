"""What every request fetched, lost and fetched again, counted from the swaps of its window."""

from typing import Dict, List

import torch


class SwapTrace:
    """Counts by window while a request decodes, by request once it has ended.

    A window belongs to one request between `begin` and `end`. Rows are known by (layer, window, position).
    """

    def __init__(self, num_layers: int, num_windows: int, max_context: int) -> None:
        self.requests: List[Dict] = []
        self.peak_batch = 0
        self._open: Dict[int, Dict] = {}
        # Positions that were in the window at any time, whether evicted since or not.
        self._seen = torch.zeros((num_layers, num_windows, max_context), dtype=torch.bool)
        self._first_written = torch.zeros(num_windows, dtype=torch.int64)
        counts = (num_layers, num_windows)
        self._fetched, self._refetched, self._written, self._evicted = (
            torch.zeros(counts, dtype=torch.int64) for _ in range(4)
        )

    def begin(self, window: int, rid: str, first_position: int) -> None:
        """A request takes an empty window; from ``first_position`` on, its rows are written by decoding."""
        self._seen[:, window] = False
        for counts in (self._fetched, self._refetched, self._written, self._evicted):
            counts[:, window] = 0
        self._first_written[window] = first_position
        self._open[window] = {"rid": rid, "first_position": first_position}

    def swap(self, layer: int, windows: torch.Tensor, before: torch.Tensor, after: torch.Tensor) -> None:
        """One layer of one decode step: the rows that came are where the table changed.

        Args:
            windows: ``[B]``, -1 for padding.
            before: ``[num_windows, lru_slots]`` position at each window offset of this layer, -1 where empty.
            after: the same after the step's rows were entered.
        """
        self.peak_batch = max(self.peak_batch, int((windows >= 0).sum()))
        entered = before != after
        window, position = entered.nonzero()[:, 0], after[entered].long()
        evicts = before[entered] >= 0
        again = self._seen[layer, window, position]
        written = position >= self._first_written[window]
        self._seen[layer, window, position] = True
        ones = torch.ones_like(window)
        self._fetched[layer].index_add_(0, window, ones)
        self._refetched[layer].index_add_(0, window, again.long())
        self._evicted[layer].index_add_(0, window, evicts.long())
        self._written[layer].index_add_(0, window, written.long())

    def end(self, window: int) -> None:
        """The request gives its window back; no effect where none has it."""
        request = self._open.pop(window, None)
        if request is None:
            return
        for name in ("fetched", "refetched", "written", "evicted"):
            request[name] = getattr(self, f"_{name}")[:, window].tolist()
        self.requests.append(request)
