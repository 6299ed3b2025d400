"""What the copies of new rows to the host add to a decode step: one server, rounds with and without them in turn.

    HARNESS_DEVICE=cuda PYTHONPATH=test python benchmark/kv_offload/step_write_back.py --out results/h200/step_write_back.json

Two servers would differ by more than the copies cost. The top-k is replayed; what it selects does not depend on the rows.
"""

import json
import statistics
from contextlib import nullcontext
from pathlib import Path
from typing import Iterator
from unittest import mock

import decode_step  # the harness before sglang and torch

import torch


def without_write_back():
    """While entered, no row goes to the host."""
    from sglang.srt.mem_cache.sparsity.nsa_offload.controller import SparseCacheController

    return mock.patch.object(SparseCacheController, "write_back", lambda *args: None)


def measure(model: Path, args) -> Iterator[dict]:
    """Rows: one for each miss rate."""
    batch = args.batches[-1]
    new_tokens = decode_step.tokens_made(1, args)
    with decode_step.chosen_topk(args) as replay, decode_step.decode_node("ours", model, args, [batch], new_tokens) as engine:
        decode_step.run_batch(engine, args.context, new_tokens, range(batch))
        for seed, miss_rate in enumerate(args.miss_rates):
            decode_step.synchronize()
            lists = decode_step.lists_of(decode_step.steps_of(args), batch, decode_step.TOP_K, args.context, miss_rate, seed)
            replay.play(lists)
            for _ in range(args.warmup):
                engine.step()
            rounds = {"with": [], "without": []}
            for turn in range(args.rounds):
                side = "with" if turn % 2 == 0 else "without"
                with without_write_back() if side == "without" else nullcontext():
                    rounds[side].append(decode_step.round_ms(engine, args.steps))
            ratio = statistics.median(rounds["with"]) / statistics.median(rounds["without"])
            row = {"batch": batch, "context": args.context, "layers": args.layers, "kv_dtype": args.dtype}
            row.update(window=args.window, replayed_miss_rate=miss_rate, steps_a_round=args.steps)
            yield {**row, "step_ms": {side: [round(ms, 4) for ms in times] for side, times in rounds.items()}, "ratio": round(ratio, 4)}
        engine.abort(all_requests=True)
        engine.drain()


def main() -> None:
    from exactness import slim_model

    parser = decode_step.parser_of(__doc__)
    parser.set_defaults(miss_rates=[0.0, 0.02], steps=20, rounds=20)
    parser.add_argument("--batches", nargs=1, type=int, default=[64], metavar="BATCH")
    parser.add_argument("--context", type=int, default=32768)
    args = parser.parse_args()
    rows = []
    for row in measure(slim_model(args.model, args.layers), args):
        rows.append({"gpu": torch.cuda.get_device_name() if decode_step.ON_GPU else "none", **row})
        print(json.dumps(rows[-1]), flush=True)
        args.out.write_text(json.dumps(rows, indent=1) + "\n")


if __name__ == "__main__":
    main()
