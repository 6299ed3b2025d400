"""What decode KV offloading does, in numbers: for log lines, Prometheus and ``/server_info``."""

from __future__ import annotations

import math
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Optional

from sglang.srt.environ import envs
from sglang.srt.mem_cache.sparsity.nsa_offload.counters import CounterSample, CounterSampler
from sglang.srt.mem_cache.sparsity.nsa_offload.shortage import (
    NOTHING,
    RESOURCES,
    queued_requests,
)
from sglang.srt.utils.common import raise_error_or_warn

if TYPE_CHECKING:
    from sglang.srt.managers.scheduler import Scheduler
    from sglang.srt.observability.metrics_collector import SchedulerMetricsCollector


@dataclass(frozen=True)
class OffloadStats:
    """One reading of one rank. Sums run from the start; rates cover the last interval.

    What the GPU counts (``entries``, hit rates, bytes to the device) is one interval old.

    Attributes:
        entries: per layer the top-k entries that were LRU hits, ring hits and misses.
        layer_hit_rates: share of hits of each layer, 0 to 1; None where nothing was read.
        hit_rate: the same over all layers.
        to_device_bytes, to_host_bytes: latent rows copied, all layers.
        to_device_rate, to_host_rate: bytes a second; 0 while idle.
        host_rows, host_rows_used: rows of the host pool without its padding page.
        retraction_bytes, retraction_bytes_used: host memory for retracted requests.
        windows, windows_used: device windows; one is a spare.
        rows_issued, rows_done: rows sent to the host, and those known to have arrived.
        queued: requests by the resource they lack.
        retracted: requests retracted since the start, by the resource that ran out.
    """

    entries: list[list[int]]
    layer_hit_rates: list[Optional[float]]
    hit_rate: Optional[float]
    to_device_bytes: int
    to_device_rate: float
    to_host_bytes: int
    to_host_rate: float
    host_rows: int
    host_rows_used: int
    retraction_bytes: int
    retraction_bytes_used: int
    windows: int
    windows_used: int
    rows_issued: int
    rows_done: int
    queued: dict[str, int]
    retracted: dict[str, int]

    @property
    def backlog(self) -> int:
        """Rows on their way to the host."""
        return self.rows_issued - self.rows_done


class OffloadMetrics:
    """Reads the parts of one scheduler's offloading; changes nothing, and waits only when idle.

    Made before the scheduler has its pools, which are looked up at the first reading.
    """

    def __init__(self, scheduler: "Scheduler"):
        self._scheduler = scheduler
        self._sampler: Optional[CounterSampler] = None
        self._retracted = dict.fromkeys(RESOURCES, 0)
        self._stats: Optional[OffloadStats] = None
        self._stats_time = 0.0
        self._published = True
        self._checked_forward = 0

    @property
    def _coordinator(self):
        return self._scheduler.req_to_token_pool.sparse_coordinator

    @property
    def _slot_limit(self) -> str:
        return self._scheduler.tp_worker.model_runner.memory_pool_config.slot_limit

    def make_collector(self, *args, **kwargs) -> "SchedulerMetricsCollector":
        """SGLang's collector with these metrics beside its own; same arguments."""
        from sglang.srt.mem_cache.sparsity.nsa_offload.collector import OffloadMetricsCollector

        return OffloadMetricsCollector(self, *args, **kwargs)

    def on_idle(self) -> None:
        """Called in each round without work; acts in the first one after a forward.

        It looks for leaks, which takes what the GPU has, and reports at once: until SGLang's next
        idle report, 30 seconds after the last, gauges would say that the server is busy.

        Raises:
            ValueError: names what leaked. It is logged instead where
                SGLANG_ENABLE_STRICT_MEM_CHECK_DURING_IDLE is off.
        """
        scheduler = self._scheduler
        if scheduler.forward_ct == self._checked_forward:
            return
        self._checked_forward = scheduler.forward_ct
        reports = scheduler.current_scheduler_metrics_enabled
        if reports:
            self._refresh()  # asks for the counts that the report will find
        try:
            self._coordinator.check_idle()
        except RuntimeError as leak:
            strict = envs.SGLANG_ENABLE_STRICT_MEM_CHECK_DURING_IDLE.get()
            raise_error_or_warn(scheduler, strict, "count_nsa_offload_leak_warnings", str(leak))
        if reports:
            scheduler.metrics_collector.last_log_time = -math.inf
            scheduler._maybe_log_idle_metrics()

    def count_retracted(self, num_requests: int) -> None:
        """Count requests that were retracted because logical slots ran out."""
        self._retracted[self._slot_limit] += num_requests

    def log_text(self) -> str:
        """Take a reading and put it into words, to follow the text of SGLang's decode line."""
        stats = self._refresh()
        self._published = False
        hits = "n/a" if stats.hit_rate is None else f"{stats.hit_rate:.3f}"
        text = (
            f", offload hit rate: {hits}, "
            f"h2d: {stats.to_device_rate / 1e9:.2f} GB/s, "
            f"d2h: {stats.to_host_rate / 1e9:.2f} GB/s, "
            f"#window: {stats.windows_used}/{stats.windows}, "
            f"#host row: {stats.host_rows_used}/{stats.host_rows}, "
            f"write-back backlog: {stats.backlog} rows"
        )
        for resource, count in stats.queued.items():
            if count and resource != NOTHING:
                text += f", queued for {resource}: {count}"
        return text

    def for_publishing(self) -> OffloadStats:
        """The reading of this report's log line, or a new one where none was logged."""
        stats = self._stats if not self._published else self._refresh()
        self._published = True
        return stats

    def server_info(self) -> dict[str, Any]:
        """The effective configuration of this rank; sizes in bytes, JSON types only."""
        coordinator = self._coordinator
        sizes, host_pool = coordinator.sizes, coordinator.host_pool
        tokens = coordinator.token_to_kv_pool.size
        return {
            "window_size": sizes.lru_slots,
            "write_back_ring": sizes.ring_slots,
            "windows": sizes.num_windows,
            "max_running_requests": self._scheduler.max_running_requests,
            "staging_slots": sizes.staging_slots,
            "tokens": tokens,
            "tokens_limited_by": self._slot_limit,
            "host_rows": tokens,
            "host_bytes": host_pool.size * host_pool.size_per_token,
            "host_memory": host_pool.memory,
            "retraction_bytes": sizes.retraction_bytes,
            "host_bytes_per_token": sizes.host_bytes_per_token,
            "device_bytes": sizes.device_bytes(tokens),
            "device_bytes_per_token": sizes.bytes_per_token,
            "window_bytes": sizes.window_bytes,
        }

    def _refresh(self) -> OffloadStats:
        coordinator, now = self._coordinator, time.perf_counter()
        if self._sampler is None:
            # Its pinned memory is allocated here, at the first report and never again.
            self._sampler = CounterSampler(coordinator.lru.counters, coordinator.controller)
        self._sampler.poll(now)
        latest, previous = self._sampler.latest, self._sampler.previous
        entries = _counts(latest, coordinator.sizes.num_layers)
        change = [
            [new - old for new, old in zip(*layers)]
            for layers in zip(entries, _counts(previous, coordinator.sizes.num_layers))
        ]
        sizes, controller = coordinator.sizes, coordinator.controller
        retraction = coordinator.token_to_kv_pool.retraction
        allocator = self._scheduler.token_to_kv_pool_allocator
        to_host = controller.rows_stored * sizes.host_bytes_per_token
        before, idle = self._stats, self._scheduler.is_fully_idle()
        stats = OffloadStats(
            entries=entries,
            layer_hit_rates=[_hit_rate([layer]) for layer in change],
            hit_rate=_hit_rate(change),
            to_device_bytes=sum(layer[2] for layer in entries) * sizes.row_bytes,
            to_device_rate=0.0 if idle else _miss_rate(latest, previous) * sizes.row_bytes,
            to_host_bytes=to_host,
            to_host_rate=(
                0.0
                if before is None
                else (to_host - before.to_host_bytes) / max(now - self._stats_time, 1e-9)
            ),
            host_rows=allocator.size,
            host_rows_used=allocator.size - allocator.available_size(),
            retraction_bytes=retraction.total,
            retraction_bytes_used=retraction.used,
            windows=coordinator.windows.num_windows,
            windows_used=coordinator.windows.num_windows - coordinator.windows.num_free,
            rows_issued=controller.rows_stored,
            rows_done=controller.rows_arrived(),
            queued=queued_requests(self._scheduler, self._slot_limit),
            retracted=dict(self._retracted),
        )
        self._stats, self._stats_time = stats, now
        return stats


def _counts(sample: Optional[CounterSample], num_layers: int) -> list[list[int]]:
    return [[0, 0, 0]] * num_layers if sample is None else sample.counts


def _hit_rate(layers: list[list[int]]) -> Optional[float]:
    hits = sum(layer[0] + layer[1] for layer in layers)
    total = hits + sum(layer[2] for layer in layers)
    return hits / total if total else None


def _miss_rate(latest: Optional[CounterSample], previous: Optional[CounterSample]) -> float:
    """Misses of all layers a second between two samples; 0 before there are two."""
    if latest is None or previous is None:
        return 0.0
    return (latest.misses - previous.misses) / max(latest.time - previous.time, 1e-9)
