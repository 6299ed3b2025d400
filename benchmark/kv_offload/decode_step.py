"""One decode step of a lone decode node: dense, HiSparse and offloading in one run on one GPU.

    HARNESS_DEVICE=cuda PYTHONPATH=test python benchmark/kv_offload/decode_step.py --miss-rates 0 0.02 0.1 --out decode_step.json

With ``--miss-rates`` the top-k is replayed (`replayed_topk.py`), in every implementation alike; 0 is the cost without copies. One
engine an implementation serves all batches and miss rates. Without, index keys are filled at random, since the fake transfer backend
delivers no bytes: queries then select rows all over the context. Ours counts its misses on the GPU, and they are reported.
"""

import itertools
import json
import statistics
import time
from pathlib import Path
from typing import Iterator

import lone_node  # the harness before sglang and torch

import torch
from exactness import slim_model

FIRST_STEPS = 8  # requests whose first decode step is timed


def tokens_made(num_batches: int, args) -> int:
    """Tokens that the first request makes while so many batches are measured at every miss rate."""
    return FIRST_STEPS + num_batches * len(args.miss_rates or [None]) * lone_node.steps_of(args) + 64


def measure(impl: str, model: Path, args, new_tokens: int = 0) -> Iterator[dict]:
    """Rows of one implementation: every batch at every miss rate.

    Args:
        new_tokens: of a request; 0 for as many as will be made.
    """
    begin = time.time()
    batches, rates = sorted(args.batches), args.miss_rates or [None]
    new_tokens = new_tokens or tokens_made(len(batches), args)
    with lone_node.chosen_topk(args) as replay, lone_node.decode_node(impl, model, args, batches, new_tokens) as engine:
        lone_node.randomize_index_keys(engine.kv_pool)
        common = {
            "impl": impl,
            "gpu": torch.cuda.get_device_name() if lone_node.ON_GPU else "none",
            "context": args.context,
            "layers": args.layers,
            "top_k": lone_node.TOP_K,
            "window": args.window,
            "kv_dtype": args.dtype,
            "pool_gb": round(lone_node.pool_bytes(engine) / 1e9, 3),
            "build_s": round(time.time() - begin, 1),
        }
        if impl.startswith("ours"):
            common["host_memory"] = engine.scheduler.req_to_token_pool.sparse_coordinator.host_pool.memory
        if replay is not None:
            lone_node.play(replay, args, 0.0)
        prompt, running, first_step = lone_node.prompt_of(args.context), 0, []
        seeds = itertools.count(1)  # positions that no measurement before has made resident
        for batch in batches:
            while running < min(batch, FIRST_STEPS):
                start = time.perf_counter()
                rid = lone_node.submit(engine, prompt, new_tokens, running)
                engine.step_until(lambda: len(engine.outputs[rid]) > 1)
                first_step.append((time.perf_counter() - start) * 1e3)
                running += 1
            lone_node.run_batch(engine, prompt, new_tokens, range(running, batch))
            running = batch
            for miss_rate in rates:
                if replay is not None:
                    lone_node.play(replay, args, miss_rate, next(seeds))
                times, counts = lone_node.time_steps(engine, args)
                assert engine.scheduler.running_batch.batch_size() == batch, "requests ended while they were timed"
                row = {
                    **common,
                    "batch": batch,
                    "replayed_miss_rate": miss_rate,
                    # From the request, whose KV has come, to the token of its first decode step, all of whose top-k misses.
                    "first_step_ms": round(statistics.median(first_step[1:] or first_step), 2),
                    "step_ms": round(statistics.median(times), 3),
                    "step_ms_rounds": [round(t, 3) for t in times],
                    "tokens_per_s": round(batch / statistics.median(times) * 1e3),
                }
                if counts is not None:
                    row["miss_rate"] = lone_node.miss_rate_of(counts, miss_rate)
                yield row
        engine.abort(all_requests=True)
        engine.drain()


def main() -> None:
    parser = lone_node.parser_of(__doc__)
    impls = ["dense", "ours", "ours_pinned", "hisparse"]
    parser.add_argument("--impls", nargs="*", default=impls, choices=impls)
    parser.add_argument("--batches", nargs="*", type=int, default=[64])
    parser.add_argument("--context", type=int, default=32768)
    args = parser.parse_args()
    model = slim_model(args.model, args.layers)
    rows = []
    for impl in args.impls:
        for row in measure(impl, model, args):
            rows.append(row)
            print(json.dumps(row), flush=True)
            args.out.write_text(json.dumps(rows, indent=1) + "\n")


if __name__ == "__main__":
    main()
