"""What a part adds to a decode step: one server, rounds with and without it in turn.

    HARNESS_DEVICE=cuda PYTHONPATH=test python benchmark/kv_offload/step_parts.py --out benchmark/kv_offload/results/h200/step_parts.json

``write_back``: new rows on their way to the host, lists and copies. ``metrics``: log text and Prometheus values of offloading, read in every step,
where a server reads them once in 40 (``--decode-log-interval``). A server a part; the top-k is replayed, what it selects does not
depend on the rows.
"""

import json
import statistics
from contextlib import ExitStack, contextmanager, nullcontext
from pathlib import Path
from typing import Iterator
from unittest import mock

import lone_node  # the harness before sglang and torch

import torch

PARTS = ("write_back", "metrics")


@contextmanager
def without(part: str) -> Iterator[None]:
    """While open, decode steps leave it out."""
    from sglang.srt.mem_cache.sparsity.nsa_offload import collector, coordinator, metrics

    replaced = {
        "write_back": [(coordinator.NSAOffloadCoordinator, "forward_end", _forget_rows)],
        "metrics": [
            (metrics.OffloadMetrics, "log_text", lambda self: ""),
            (collector.OffloadMetricsCollector, "log_stats", collector.SchedulerMetricsCollector.log_stats),
        ],
    }[part]
    with ExitStack() as stack:
        for owner, name, other in replaced:
            stack.enter_context(mock.patch.object(owner, name, other))
        yield


def _forget_rows(self, batch, result) -> None:
    """In place of ``forward_end``: the step's rows count as written, and are not."""
    for req, length in zip(batch.reqs, batch.seq_lens_cpu.tolist()):
        lease = self._leases.get(req.req_pool_idx)
        if lease is not None:
            lease.end_position = length


def measure(part: str, model: Path, args) -> Iterator[dict]:
    """Rows: one for each miss rate."""
    args.batches, new_tokens = [args.batch], len(args.miss_rates) * lone_node.steps_of(args) + 64
    reads = {"enable_metrics": True, "decode_log_interval": 1} if part == "metrics" else {}
    with (
        lone_node.chosen_topk(args) as replay,  # before the node, which captures its graphs
        lone_node.decode_node("ours", model, args, args.batches, new_tokens, **reads) as engine,
    ):
        counters = engine.scheduler.req_to_token_pool.sparse_coordinator.lru.counters
        lone_node.run_batch(engine, lone_node.prompt_of(args.context), new_tokens, range(args.batch))
        for seed, miss_rate in enumerate(args.miss_rates):
            lone_node.play(replay, args, miss_rate, seed)
            for _ in range(args.warmup):
                engine.step()
            before, rounds = counters.clone(), {"with": [], "without": []}
            for turn in range(args.rounds):
                side = "with" if turn % 2 == 0 else "without"
                with without(part) if side == "without" else nullcontext():
                    rounds[side].append(lone_node.round_ms(engine, args.steps))
            counts = (counters - before).sum(0).tolist()
            ratio = statistics.median(rounds["with"]) / statistics.median(rounds["without"])
            row = {"part": part, "batch": args.batch, "context": args.context, "layers": args.layers, "kv_dtype": args.dtype}
            row.update(window=args.window, replayed_miss_rate=miss_rate, steps_a_round=args.steps)
            row["miss_rate"] = lone_node.miss_rate_of(counts, miss_rate)
            row["step_ms"] = {side: [round(ms, 4) for ms in times] for side, times in rounds.items()}
            yield {**row, "ratio": round(ratio, 4)}
        engine.abort(all_requests=True)
        engine.drain()


def main() -> None:
    from exactness import slim_model

    parser = lone_node.parser_of(__doc__)
    parser.set_defaults(miss_rates=[0.0, 0.02], steps=20, rounds=20)
    parser.add_argument("--parts", nargs="*", default=PARTS, choices=PARTS)
    parser.add_argument("--batch", type=int, default=64)
    parser.add_argument("--context", type=int, default=32768)
    args = parser.parse_args()
    rows = []
    for part in args.parts:
        for row in measure(part, slim_model(args.model, args.layers), args):
            rows.append({"gpu": torch.cuda.get_device_name() if lone_node.ON_GPU else "none", **row})
            print(json.dumps(rows[-1]), flush=True)
            args.out.write_text(json.dumps(rows, indent=1) + "\n")


if __name__ == "__main__":
    main()
