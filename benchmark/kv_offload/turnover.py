"""Turnover: what a lone decode node makes while requests come and go, beside what it makes with a fixed batch.

    HARNESS_DEVICE=cuda PYTHONPATH=test python benchmark/kv_offload/turnover.py --out turnover.json

So many requests are outstanding at any time, with outputs of 16 to 96 tokens: at 64 about one ends and one begins in every step.
A context below the top-k selects all its rows, so a new request's first step loads them and little else misses. At longer ones each
step selects its newest rows (`newest_topk`): a first step loads a whole top-k, a later one the row that has left the ring.
"""

import contextlib
import json
import random
import statistics
import time
from argparse import Namespace
from typing import Iterator
from unittest import mock

import lone_node
import torch
from exactness import slim_model

OUTPUT = (16, 96)
SETTLE_STEPS = 150


@contextlib.contextmanager
def newest_topk() -> Iterator[None]:
    """While open, the top-k are the newest positions, in every implementation; graphs capture it."""
    import sgl_kernel

    def newest(lengths, topk):
        column = torch.arange(topk, device=lengths.device, dtype=torch.int32)
        chosen = torch.where(lengths[:, None] > topk, lengths[:, None] - topk + column, column)
        return torch.where(chosen < lengths[:, None], chosen, -1).int()

    def positions(score, lengths, topk, row_starts=None):
        return newest(lengths, topk)

    def transform(score, lengths, page_table_size_1, cu_seqlens_q, topk, row_starts=None):
        chosen = newest(lengths, topk)
        found = torch.gather(page_table_size_1, 1, chosen.clamp_min(0).long())
        return torch.where(chosen >= 0, found.int(), -1)

    with (
        mock.patch.object(sgl_kernel, "fast_topk_v2", positions),
        mock.patch.object(sgl_kernel, "fast_topk_transform_fused", transform),
    ):
        yield


class Traffic:
    """Keeps ``outstanding`` requests on an engine, each with a random number of tokens to make."""

    def __init__(self, engine, prompt: list, outstanding: int, room: int):
        self._engine, self._prompt, self._outstanding, self._room = engine, prompt, outstanding, room
        self._rng, self._live = random.Random(1), {}

    def steps(self, count: int) -> dict:
        """Serve so many steps: milliseconds a step, tokens a second of requests that ended, how many, the mean batch."""
        made = ended = running = 0
        lone_node.synchronize()
        start = time.perf_counter()
        for _ in range(count):
            while len(self._live) < self._outstanding:
                tokens = self._rng.randint(*OUTPUT)
                self._live[lone_node.submit(self._engine, self._prompt, tokens, self._room)] = tokens
                self._room += 1
            self._engine.step()
            running += self._engine.scheduler.running_batch.batch_size()
            for rid in [rid for rid in self._live if rid in self._engine.finished]:
                made += self._live.pop(rid)
                ended += 1
        lone_node.synchronize()
        seconds = time.perf_counter() - start
        return {
            "step_ms": round(seconds / count * 1e3, 3),
            "tokens_per_s": round(made / seconds),
            "ended": ended,
            "mean_batch": round(running / count, 1),
        }


def measure(impl: str, model, args) -> dict:
    """One server: a fixed batch first, then turnover."""
    batch, prompt = args.outstanding, lone_node.prompt_of(args.context)
    fixed_tokens = args.warmup + args.steps * args.rounds + 20
    options = Namespace(**{**vars(args), "miss_rates": None, "batches": [batch]})
    chosen = newest_topk() if args.context > lone_node.TOP_K else contextlib.nullcontext()
    graphs = [batch // 2, 3 * batch // 4, batch]
    with chosen, lone_node.decode_node(impl, model, options, graphs, fixed_tokens + OUTPUT[1]) as engine:
        lone_node.randomize_index_keys(engine.kv_pool)
        lone_node.run_batch(engine, prompt, fixed_tokens, range(batch))
        fixed, counts = lone_node.time_steps(engine, args)
        engine.abort(all_requests=True)
        engine.drain()
        traffic = Traffic(engine, prompt, batch, room=batch)
        traffic.steps(SETTLE_STEPS)
        rounds = [traffic.steps(args.turnover_steps) for _ in range(3)]
        row = {
            "impl": impl,
            "gpu": torch.cuda.get_device_name() if lone_node.ON_GPU else "none",
            "context": args.context,
            "outstanding": batch,
            "layers": args.layers,
            "window": args.window,
            "kv_dtype": args.dtype,
            "fixed_ms": round(statistics.median(fixed), 3),
            "fixed_miss_rate": None if counts is None else lone_node.miss_rate_of(counts, None),
            "turnover": rounds,
            "tokens_per_s": statistics.median(r["tokens_per_s"] for r in rounds),
        }
        engine.abort(all_requests=True)
        engine.drain()
    return row


def main() -> None:
    parser = lone_node.parser_of(__doc__)
    impls = ["dense", "ours", "ours_pinned", "hisparse"]
    parser.add_argument("--impls", nargs="*", default=impls, choices=impls)
    parser.add_argument("--contexts", nargs="*", type=int, default=[2000, 32768])
    parser.add_argument("--outstanding", type=int, default=64)
    parser.add_argument("--turnover-steps", type=int, default=200)
    args = parser.parse_args()
    model, rows = slim_model(args.model, args.layers), []
    for context in args.contexts:
        for impl in args.impls:
            row = measure(impl, model, Namespace(**vars(args), context=context))
            dense = next((r["tokens_per_s"] for r in rows if (r["impl"], r["context"]) == ("dense", context)), None)
            row["of_flag_off"] = round(row["tokens_per_s"] / dense, 3) if dense else None
            rows.append(row)
            print(json.dumps(row), flush=True)
            args.out.write_text(json.dumps(rows, indent=1) + "\n")


if __name__ == "__main__":
    main()
