"""What a pair's run shows, in numbers."""

from dataclasses import asdict, dataclass
from typing import Any, Dict, List, Optional

from demo.metrics import Metrics
from demo.pair import PairRun, Tokens
from demo.workload import Request

INDEX_KEY_BYTES = 132


@dataclass(frozen=True)
class Traffic:
    """What the server with offloading moved, counted by the plugin and by the feature's own counters.

    Lists have an entry a layer.

    Attributes:
        hits, ring_hits, misses: top-k entries found in the window's LRU part, in its ring, and neither.
        fetched: rows the plugin saw fetched; equal to ``misses`` unless one of them is wrong.
        refetched: those that had been in the window and were evicted.
        written: those that decoding had written.
        evicted_requests: requests that lost a row to another.
        peak_batch: most requests in one decode step.
        to_device_bytes, to_host_bytes: latent rows, all layers.
    """

    hits: List[int]
    ring_hits: List[int]
    misses: List[int]
    fetched: List[int]
    refetched: List[int]
    written: List[int]
    evicted_requests: int
    peak_batch: int
    to_device_bytes: int
    to_host_bytes: int

    @property
    def hit_rates(self) -> List[float]:
        found = [a + b for a, b in zip(self.hits, self.ring_hits)]
        return [f / max(1, f + m) for f, m in zip(found, self.misses)]


@dataclass(frozen=True)
class Memory:
    """Bytes that the longest request holds.

    Attributes:
        tokens: of that request.
        device_off: latent rows and index keys of every token.
        device_on: index keys of every token, and a window with its ring and tables.
        host: latent rows of every token.
        host_pool: the whole pool, as allocated.
        staging: device rows that prompts in prefill share, beside the windows.
    """

    tokens: int
    device_off: int
    device_on: int
    host: int
    host_pool: int
    staging: int


@dataclass(frozen=True)
class Evidence:
    """One dtype's tokens, traffic and memory; None where the plugin, or the endpoint, said nothing."""

    dtype: str
    requests: List[Request]
    off: Tokens
    on: Tokens
    overlap: List[bool]
    traffic: Optional[Traffic]
    memory: Optional[Memory]
    metrics: Optional[Metrics]

    @property
    def equal(self) -> List[str]:
        """Requests with the same tokens on both sides."""
        return [r.rid for r in self.requests if self.off.get(r.rid) == self.on.get(r.rid)]

    def to_json(self) -> Dict[str, Any]:
        content = asdict(self)
        if self.traffic is not None:
            content["traffic"]["hit_rates"] = self.traffic.hit_rates
        return content


def gather(run: PairRun, requests: List[Request]) -> Evidence:
    """Evidence of a run of ``requests``."""
    traffic = memory = None
    if run.trace is not None:
        traffic, memory = _traffic(run.trace), _memory(run.trace, requests)
    return Evidence(run.dtype, requests, run.off, run.on, list(run.overlap), traffic, memory, run.metrics)


def _traffic(trace: Dict[str, Any]) -> Traffic:
    hits, ring_hits, misses = (list(column) for column in zip(*trace["counters"]))
    seen, sizes = trace["requests"], trace["sizes"]

    def by_layer(name: str) -> List[int]:
        return [sum(layer) for layer in zip(*(request[name] for request in seen))]

    return Traffic(
        hits=hits,
        ring_hits=ring_hits,
        misses=misses,
        fetched=by_layer("fetched"),
        refetched=by_layer("refetched"),
        written=by_layer("written"),
        evicted_requests=len({request["rid"] for request in seen if any(request["evicted"])}),
        peak_batch=trace["peak_batch"],
        to_device_bytes=sum(misses) * sizes["row_bytes"],
        to_host_bytes=trace["rows_stored"] * sizes["host_bytes_per_token"],
    )


def _memory(trace: Dict[str, Any], requests: List[Request]) -> Memory:
    sizes = trace["sizes"]
    tokens = max(request.total_len for request in requests)
    return Memory(
        tokens=tokens,
        device_off=(sizes["row_bytes"] + INDEX_KEY_BYTES) * sizes["num_layers"] * tokens,
        device_on=int(sizes["bytes_per_token"] * tokens) + sizes["window_bytes"],
        host=sizes["host_bytes_per_token"] * tokens,
        host_pool=trace["host_pool_bytes"],
        staging=sizes["fixed_bytes"],
    )
