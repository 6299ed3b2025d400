"""Two real servers of one KV dtype, without and with offloading, given the same requests at the same time."""

import contextlib
import functools
import json
import os
import sys
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Dict, List, Optional, Tuple

from tqdm import tqdm

from demo.metrics import Metrics, parse
from demo.workload import RING, WINDOW, Phase
from harness.environment import child_environment
from harness.server import Server

TRACE_PLUGIN = Path(__file__).parent / "trace_plugin"

REDRAW_S = 0.5 if sys.stderr.isatty() else 15
"""A log gets few lines."""

Tokens = Dict[str, List[int]]


@dataclass(frozen=True)
class PairRun:
    """What two servers answered.

    Attributes:
        off, on: request to its tokens.
        overlap: whether the overlap scheduler ran, without and with offloading.
        trace: what the plugin wrote; None where it wrote nothing.
        metrics: what the server with offloading said at the end; None where it said nothing.
    """

    dtype: str
    off: Tokens
    on: Tokens
    overlap: Tuple[bool, bool]
    trace: Optional[Dict[str, Any]]
    metrics: Optional[Metrics] = None


def run_pair(dtype: str, model: Path, phases: List[Phase], folder: Path) -> PairRun:
    """Start both servers, send everything, stop them. Logs and the trace stay in ``folder``."""
    trace = folder / f"{dtype}-trace.json"
    trace.unlink(missing_ok=True)
    total = 2 + 2 * sum(len(phase.requests) for phase in phases)
    with contextlib.ExitStack() as stack:
        # Left last, when the servers have stopped: a thread may wait for an answer until then.
        pool = stack.enter_context(ThreadPoolExecutor(2))
        bar = stack.enter_context(
            tqdm(total=total, bar_format="{desc:<28}{bar:40} {n}/{total} {elapsed}", mininterval=REDRAW_S)
        )
        sides = [
            stack.enter_context(_Side(name, dtype, model, folder, trace, bar))
            for name in ("off", "on")
        ]
        bar.set_description_str(f"{dtype}: starting")
        _all(pool, bar, [side.wait_ready for side in sides])
        overlap = tuple(side.overlap() for side in sides)
        tokens: Dict[str, Tokens] = {"off": {}, "on": {}}
        for phase in phases:
            bar.set_description_str(f"{dtype}: {phase.at_once} at once")
            answers = _all(pool, bar, [functools.partial(side.send, phase) for side in sides])
            for side, answer in zip(sides, answers):
                tokens[side.name].update(answer)
        metrics = parse(sides[1].scrape())
        bar.set_description_str(f"{dtype}: stopping")
        _all(pool, bar, [side.stop for side in sides])
        bar.set_description_str(dtype)
    seen = json.loads(trace.read_text()) if trace.exists() else None
    return PairRun(dtype, tokens["off"], tokens["on"], overlap, seen, metrics)


class _Side:
    """One of the two servers."""

    def __init__(self, name: str, dtype: str, model: Path, folder: Path, trace: Path, bar: tqdm) -> None:
        self.name = name
        self._bar = bar
        args = ["--kv-cache-dtype", dtype, "--disable-radix-cache", "--sleep-on-idle"]
        args += ["--context-length", "2048", "--max-running-requests", "20"]
        env = {}
        if name == "on":
            config = {"window_size": WINDOW, "write_back_ring": RING}
            args += ["--enable-decode-nsa-kv-offload", "--enable-metrics", "--decode-log-interval", "10"]
            args += ["--decode-nsa-kv-offload-config", json.dumps(config)]
            path = child_environment()["PYTHONPATH"]
            env = {"SWAP_TRACE": str(trace), "PYTHONPATH": f"{TRACE_PLUGIN}{os.pathsep}{path}"}
        self._server = Server(model, folder / f"{dtype}-{name}.log", args, env, wait=False)

    def __enter__(self) -> "_Side":
        return self

    def __exit__(self, *exc) -> None:
        self.stop()

    def stop(self) -> None:
        self._server.stop()

    def wait_ready(self) -> None:
        self._server.wait_ready()
        self._bar.update()

    def overlap(self) -> bool:
        return not json.loads(self._server.get("/server_info"))["disable_overlap_schedule"]

    def scrape(self) -> str:
        return self._server.get("/metrics/")

    def send(self, phase: Phase) -> Tokens:
        """Answers of a phase, by request."""
        with ThreadPoolExecutor(phase.at_once) as pool:
            return {
                request.rid: ids
                for group in phase.groups
                for request, ids in zip(group, pool.map(self._send, group))
            }

    def _send(self, request) -> List[int]:
        answer = self._server.generate(request.ids, request.new_tokens, rid=request.rid)
        self._bar.update()
        return answer["output_ids"]


def _all(pool: ThreadPoolExecutor, bar: tqdm, calls) -> List[Any]:
    """Results of the calls, run together; the first error is raised at once. Keeps the bar's clock going."""
    futures: List[Future] = [pool.submit(call) for call in calls]
    waiting = set(futures)
    while waiting:
        done, waiting = wait(waiting, timeout=REDRAW_S)
        for future in done:
            future.result()
        bar.refresh()
    return [future.result() for future in futures]
