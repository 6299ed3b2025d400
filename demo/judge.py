"""The verdict: what must hold, and what is missing."""

from typing import List, Optional

from demo.evidence import Evidence, Traffic
from demo.metrics import Metrics

LEAST_EVICTED = 20
LEAST_TOGETHER = 16
LEAST_SAID = 0.8


def failures(evidence: Evidence) -> List[str]:
    """What the evidence lacks, in words; empty where it is complete."""
    lacks = _tokens(evidence)
    if evidence.traffic is None:
        lacks.append("nothing was traced on the server with the flag on")
    else:
        lacks += _traffic(evidence.traffic)
        lacks += _metrics(evidence.metrics, evidence.traffic)
    return [f"{evidence.dtype}: {text}" for text in lacks]


def _tokens(evidence: Evidence) -> List[str]:
    lacks = []
    for request in evidence.requests:
        off, on = evidence.off.get(request.rid, []), evidence.on.get(request.rid, [])
        for name, tokens in (("off", off), ("on", on)):
            if len(tokens) != request.new_tokens:
                lacks.append(f"{request.rid}: {len(tokens)} of {request.new_tokens} tokens, flag {name}")
        if off != on:
            same = next((i for i, (a, b) in enumerate(zip(off, on)) if a != b), min(len(off), len(on)))
            lacks.append(f"{request.rid}: tokens differ from number {same} on")
    return lacks


def _metrics(metrics: Optional[Metrics], traffic: Traffic) -> List[str]:
    """The endpoint is late by up to two log intervals, so it may lack a little of what the plugin saw."""
    if metrics is None:
        return ["the metrics endpoint says nothing of offloading"]
    lacks = []
    for name, said, counted in (
        ("misses", metrics.misses, sum(traffic.misses)),
        ("hits", metrics.hits, sum(traffic.hits) + sum(traffic.ring_hits)),
        ("bytes to the device", metrics.to_device_bytes, traffic.to_device_bytes),
        ("bytes to the host", metrics.to_host_bytes, traffic.to_host_bytes),
    ):
        if not LEAST_SAID * counted <= said <= counted:
            lacks.append(f"the metrics endpoint says {said} {name}, {counted} were counted")
    return lacks


def _traffic(traffic: Traffic) -> List[str]:
    lacks = []
    if traffic.evicted_requests < LEAST_EVICTED:
        lacks.append(f"{traffic.evicted_requests} requests evicted, {LEAST_EVICTED} must")
    if traffic.peak_batch < LEAST_TOGETHER:
        lacks.append(f"{traffic.peak_batch} requests decoded at once, {LEAST_TOGETHER} must")
    if len(traffic.refetched) != len(traffic.misses):
        lacks.append(f"{len(traffic.refetched)} of {len(traffic.misses)} layers were traced")
    for layer, rows in enumerate(traffic.refetched):
        if not rows:
            lacks.append(f"layer {layer} fetched no evicted row again")
    if not any(traffic.written):
        lacks.append("no step fetched a row that decoding had written")
    if traffic.fetched != traffic.misses:
        lacks.append(f"rows fetched {traffic.fetched} and misses counted {traffic.misses} differ")
    return lacks
