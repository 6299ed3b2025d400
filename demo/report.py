"""What is printed and what is written down."""

import json
from pathlib import Path
from typing import Callable, List, Tuple

from demo.evidence import Evidence
from demo.workload import RING, TOP_K, WINDOW

LABEL = 30
COLUMN = 20


def headline(requests: int) -> str:
    return (
        f"{requests} requests, 1 to 16 at once, to a real server without and one with\n"
        f"--enable-decode-nsa-kv-offload; tiny DeepSeek-V3.2 on the CPU, top-k {TOP_K}, window\n"
        f"{WINDOW} rows and a ring of {RING}."
    )


def table(evidences: List[Evidence]) -> str:
    """A column a dtype. Those without a trace show their tokens only."""
    rows: List[Tuple[str, Callable[[Evidence], str]]] = [
        ("tokens equal", lambda e: f"{len(e.equal)} of {len(e.requests)}"),
        ("overlap scheduler, off / on", lambda e: " / ".join(_yes(o) for o in e.overlap)),
    ]
    traced = [e for e in evidences if e.traffic is not None]
    for layer in range(min((len(e.traffic.misses) for e in traced), default=0)):
        rows.append((f"hit rate, layer {layer}", _of(layer, lambda t, i: f"{t.hit_rates[i]:.1%}")))
    if traced:
        rows += [
            ("requests that evicted", _traffic(lambda t: str(t.evicted_requests))),
            ("rows fetched", _traffic(lambda t: f"{sum(t.fetched):,}")),
            ("  again, after eviction", _traffic(lambda t: f"{sum(t.refetched):,}")),
            ("  written by decoding", _traffic(lambda t: f"{sum(t.written):,}")),
            ("most requests in a step", _traffic(lambda t: str(t.peak_batch))),
            ("bytes host to device", _traffic(lambda t: size(t.to_device_bytes))),
            ("bytes device to host", _traffic(lambda t: size(t.to_host_bytes))),
            ("device bytes a request, off", _memory(lambda m: size(m.device_off))),
            ("device bytes a request, on", _memory(lambda m: f"{size(m.device_on)}, {m.device_off / m.device_on:.1f}x less")),
            ("host bytes a request", _memory(lambda m: size(m.host))),
            ("host pool", _memory(lambda m: size(m.host_pool))),
        ]
    lines = [" " * LABEL + "".join(f"{e.dtype:>{COLUMN}}" for e in evidences)]
    lines += [f"{name:<{LABEL}}" + "".join(f"{cell(e):>{COLUMN}}" for e in evidences) for name, cell in rows]
    if traced:
        memory = traced[0].memory
        lines += [
            f"A request: the longest, {memory.tokens} tokens, all layers. Off: latent rows and index keys;",
            "on: index keys, and a window with ring and tables. Prefill's staging area is shared and",
            f"not counted ({', '.join(f'{e.dtype} {size(e.memory.staging)}' for e in traced)}).",
        ]
    lines += [metrics_line(e) for e in evidences if e.metrics is not None]
    return "\n".join(lines)


def metrics_line(evidence: Evidence) -> str:
    said = evidence.metrics
    return (
        f"/metrics, {evidence.dtype}: hit rate {said.hit_rate:.1%}, {said.misses:,} misses, "
        f"{size(said.to_device_bytes)} to the device, {size(said.to_host_bytes)} to the host"
    )


def write(path: Path, evidences: List[Evidence], failures: List[str], seconds: float) -> None:
    """The evidence as JSON, and beside it the tokens: request, off, on."""
    contents = [evidence.to_json() for evidence in evidences]
    tokens = {c["dtype"]: {"off": c.pop("off"), "on": c.pop("on")} for c in contents}
    report = {"passed": not failures, "failures": failures, "seconds": round(seconds, 1), "runs": contents}
    path.write_text(json.dumps(report, indent=1) + "\n")
    path.with_name("tokens.json").write_text(json.dumps(tokens) + "\n")


def size(count: int) -> str:
    """Bytes in thousands or millions."""
    return f"{count / 1e6:.2f} MB" if count >= 1e6 else f"{count / 1e3:.0f} kB"


def _yes(value: bool) -> str:
    return "yes" if value else "no"


def _traffic(cell):
    return lambda e: "-" if e.traffic is None else cell(e.traffic)


def _memory(cell):
    return lambda e: "-" if e.memory is None else cell(e.memory)


def _of(layer, cell):
    return _traffic(lambda t: cell(t, layer))
