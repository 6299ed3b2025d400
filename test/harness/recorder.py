"""Records which rows each decode step's top-k selects, and replays a window over them."""

from typing import Dict, List, NamedTuple, Set

import torch

from harness.scheduler import InprocScheduler


class Selection(NamedTuple):
    """One decode step of one layer."""

    step: int
    layer: int
    indices: torch.Tensor
    """int32 [batch, topk] as the attention backend receives them: slots with fused top-k, else positions; -1 is none."""


class TopkRecorder:
    """While open, records every call of the attention backend's ``forward_decode``."""

    def __init__(self, engine: InprocScheduler) -> None:
        self.engine = engine
        self.selections: List[Selection] = []

    def __enter__(self) -> "TopkRecorder":
        backend = self.engine.attention_backend
        decode = type(backend).forward_decode

        def recorded(*args, **kwargs):
            layer = kwargs["layer"] if "layer" in kwargs else args[3]
            indices = kwargs["topk_indices"]
            self.selections.append(Selection(self.engine.steps, layer.layer_id, indices.clone()))
            return decode(backend, *args, **kwargs)

        backend.forward_decode = recorded
        return self

    def __exit__(self, *exc) -> None:
        del self.engine.attention_backend.forward_decode

    def rows(self, row: int = 0) -> Dict[int, List[List[int]]]:
        """Layer to the selected indices of batch row ``row``, a list for each step, without -1."""
        out: Dict[int, List[List[int]]] = {}
        for selection in self.selections:
            chosen = selection.indices[row]
            out.setdefault(selection.layer, []).append(chosen[chosen >= 0].tolist())
        return out


def lru_fetches(steps: List[List[int]], window: int) -> List[Set[int]]:
    """Rows each step fetches into an LRU window of ``window`` rows, empty at first; no step evicts its own rows."""
    age: Dict[int, int] = {}
    fetches = []
    for now, rows in enumerate(steps):
        wanted = set(rows)
        assert len(wanted) <= window
        fetches.append(wanted - age.keys())
        age.update((row, now) for row in wanted)
        for row in sorted(age, key=age.get)[: max(0, len(age) - window)]:
            del age[row]
    return fetches


def lru_misses(steps: List[List[int]], window: int) -> List[int]:
    """How many rows each step fetches; see `lru_fetches`."""
    return [len(rows) for rows in lru_fetches(steps, window)]
