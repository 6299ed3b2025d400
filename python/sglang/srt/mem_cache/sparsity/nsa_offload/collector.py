"""Prometheus metrics of decode KV offloading, beside SGLang's own and on the same endpoint."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Optional

from sglang.srt.observability.metrics_collector import (
    SchedulerMetricsCollector,
    SchedulerStats,
)

if TYPE_CHECKING:
    from sglang.srt.mem_cache.sparsity.nsa_offload.metrics import OffloadMetrics, OffloadStats

PREFIX = "sglang:nsa_offload_"
_RESULTS = ("lru_hit", "ring_hit", "miss")

# name: (documentation, further labels)
GAUGES = {
    "hit_rate": ("Share of top-k entries found on the device, all layers.", ()),
    "layer_hit_rate": ("Share of top-k entries found on the device, by layer.", ("layer",)),
    "copy_bytes_per_second": ("Latent rows copied.", ("direction",)),
    "host_rows": ("Rows of the host pool.", ()),
    "host_rows_used": ("Rows of the host pool that hold a token.", ()),
    "retraction_bytes": ("Host memory for retracted requests.", ()),
    "retraction_bytes_used": ("What retracted requests have of it.", ()),
    "windows": ("Device windows; one is a spare.", ()),
    "windows_used": ("Device windows of running requests.", ()),
    "queued_requests": ("Queued requests, by the resource they lack.", ("lack",)),
    "write_back_backlog_rows": ("Rows on their way to the host.", ()),
}
COUNTERS = {
    "topk_entries_total": ("Top-k entries; misses are copied.", ("layer", "result")),
    "copied_bytes_total": ("Latent rows copied.", ("direction",)),
    "write_back_rows_total": ("Rows sent to the host and arrived there.", ("state",)),
    "retracted_requests_total": ("Requests retracted, by what ran out.", ("lack",)),
}


class OffloadMetricsCollector(SchedulerMetricsCollector):
    """SGLang's collector, which also publishes one rank's ``OffloadStats``.

    SGLang calls ``log_stats`` at each report of a decode or prefill batch and, every 30
    seconds, while idle.
    """

    def __init__(self, metrics: "OffloadMetrics", *args, labels: dict[str, str], **kwargs):
        super().__init__(*args, labels=labels, **kwargs)
        # SGLang sets PROMETHEUS_MULTIPROC_DIR first; the client reads it when imported.
        from prometheus_client import Counter, Gauge

        self._offload = metrics
        self._offload_metrics = {
            name: Gauge(
                PREFIX + name,
                text,
                labelnames=[*labels, *more],
                multiprocess_mode="mostrecent",
            )
            for name, (text, more) in GAUGES.items()
        }
        for name, (text, more) in COUNTERS.items():
            self._offload_metrics[name] = Counter(
                PREFIX + name, text, labelnames=[*labels, *more]
            )
        # By name and further labels: there are hundreds, and the client is slow to find them.
        self._children: dict[tuple, Any] = {}
        self._last: dict[tuple, int] = {}

    def log_stats(self, stats: SchedulerStats) -> None:
        super().log_stats(stats)
        self._publish(self._offload.for_publishing())

    def _publish(self, stats: "OffloadStats") -> None:
        self._set("hit_rate", stats.hit_rate)
        for layer, rate in enumerate(stats.layer_hit_rates):
            self._set("layer_hit_rate", rate, layer=layer)
        self._set("copy_bytes_per_second", stats.to_device_rate, direction="h2d")
        self._set("copy_bytes_per_second", stats.to_host_rate, direction="d2h")
        self._set("host_rows", stats.host_rows)
        self._set("host_rows_used", stats.host_rows_used)
        self._set("retraction_bytes", stats.retraction_bytes)
        self._set("retraction_bytes_used", stats.retraction_bytes_used)
        self._set("windows", stats.windows)
        self._set("windows_used", stats.windows_used)
        self._set("write_back_backlog_rows", stats.backlog)
        for resource, count in stats.queued.items():
            self._set("queued_requests", count, lack=resource)

        for layer, counts in enumerate(stats.entries):
            for result, count in zip(_RESULTS, counts):
                self._raise_to("topk_entries_total", count, layer=layer, result=result)
        self._raise_to("copied_bytes_total", stats.to_device_bytes, direction="h2d")
        self._raise_to("copied_bytes_total", stats.to_host_bytes, direction="d2h")
        self._raise_to("write_back_rows_total", stats.rows_issued, state="issued")
        self._raise_to("write_back_rows_total", stats.rows_done, state="done")
        for resource, count in stats.retracted.items():
            self._raise_to("retracted_requests_total", count, lack=resource)

    def _set(self, name: str, value: Optional[float], **more) -> None:
        """Set a gauge; a value that is not known leaves it as it is."""
        if value is not None:
            self._child(name, more).set(value)

    def _raise_to(self, name: str, total: int, **more) -> None:
        """Bring a counter to ``total``; Prometheus counters only know steps."""
        key = (name, *more.values())
        self._child(name, more).inc(total - self._last.get(key, 0))
        self._last[key] = total

    def _child(self, name: str, more: dict[str, Any]) -> Any:
        key = (name, *more.values())
        child = self._children.get(key)
        if child is None:
            metric = self._offload_metrics[name]
            child = self._children[key] = metric.labels(**self.labels, **more)
        return child
