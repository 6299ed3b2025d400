"""What a server with offloading says of itself on SGLang's Prometheus endpoint."""

import re
from dataclasses import dataclass
from typing import Dict, List, Optional, Tuple

PREFIX = "sglang:nsa_offload_"
_SAMPLE = re.compile(rf"^{PREFIX}(\w+)\{{(.*)\}} (\S+)$", re.MULTILINE)
_LABEL = re.compile(r'(\w+)="([^"]*)"')


@dataclass(frozen=True)
class Metrics:
    """Sums over all layers since the start; at most two log intervals older than the scrape.

    Attributes:
        hits, misses: top-k entries found on the device, and not.
        to_device_bytes, to_host_bytes: latent rows copied.
        windows: device windows.
        host_rows: rows of the host pool.
    """

    hits: int
    misses: int
    to_device_bytes: int
    to_host_bytes: int
    windows: int
    host_rows: int

    @property
    def hit_rate(self) -> float:
        return self.hits / max(1, self.hits + self.misses)


def parse(text: str) -> Optional[Metrics]:
    """Metrics of a scrape; None where it has none of offloading."""
    samples: List[Tuple[str, Dict[str, str], float]] = [
        (name, dict(_LABEL.findall(labels)), float(value))
        for name, labels, value in _SAMPLE.findall(text)
    ]

    def total(name: str, **labels: str) -> int:
        return int(sum(v for n, has, v in samples if n == name and labels.items() <= has.items()))

    if not samples:
        return None
    return Metrics(
        hits=sum(total("topk_entries_total", result=result) for result in ("lru_hit", "ring_hit")),
        misses=total("topk_entries_total", result="miss"),
        to_device_bytes=total("copied_bytes_total", direction="h2d"),
        to_host_bytes=total("copied_bytes_total", direction="d2h"),
        windows=total("windows"),
        host_rows=total("host_rows"),
    )
