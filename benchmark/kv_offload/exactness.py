"""Tokens with offloading against tokens without, on a GPU: graphs and eager, overlap on and off, both KV dtypes.

    HARNESS_DEVICE=cuda PYTHONPATH=test python benchmark/kv_offload/exactness.py --out exactness.json

Every engine is the real scheduler in this process, so both sides see the same requests in the same order and form the same
batches. The first case first shows that runs without offloading agree (`--off-runs`); only then does a comparison mean anything.
A fourth part of a case's name is a number of draft tokens: multi-token prediction on both sides, which must accept as many. A fifth
says what happens to the side with offloading: `late` has the stream of loads, and the forward after it, wait a while in every layer; a
fault leaves out a wait as well, and must change tokens (eager only: a graph cannot be captured without); `ranks` is `late` with what
other data-parallel ranks cause: an idle forward after each step, after which freed memory is overwritten, and eager batches that are padded,
on both sides, since a kernel splits its work by the batch.
"""

import argparse
import itertools
import json
import random
import time
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Iterator
from unittest import mock

import harness  # noqa: F401  (sets the environment; before sglang and torch)

import torch
from deterministic_topk import deterministic_topk
from harness import mlp_sync, offload
from harness.scheduler import InprocScheduler
from tiny_model import TinySpec, write_checkpoint

LATE_CYCLES = 200_000
LOAD_FAULTS = ("attention_does_not_wait", "load_does_not_wait")
BACKENDS = {"bfloat16": "flashmla_sparse", "fp8_e4m3": "flashmla_kv"}


def slim_model(folder: Path, layers: int, drafts: float = 0.0) -> Path:
    """A checkpoint with real attention sizes for Hopper's kernels, few layers, seeded weights; see `TinySpec.drafts`."""
    spec = TinySpec(
        drafts=drafts,
        layers=layers,
        topk=2048,
        heads=16,
        index_heads=64,
        hidden=1024,
        vocab=4096,
        experts=8,
        q_lora_rank=512,
        max_position=163840,
    )
    folder = folder.with_name(f"{folder.name}-{layers}" + ("-drafts" if drafts else ""))
    write_checkpoint(folder, spec)
    return folder


def prompts(count: int, max_len: int, seed: int, min_len: int = 1) -> list:
    """Random prompts of mixed lengths: the edges of top-k and window, then lengths spread up to ``max_len``; none under ``min_len``."""
    rng = random.Random(seed)
    lengths = [1, 63, 64, 65, 2047, 2048, 2049, 4095, 4096, 4097, max_len]
    while len(lengths) < count:
        lengths.append(int(max_len * rng.random() ** 3) + 1)
    lengths = [max(n, min_len) for n in lengths[:count]]
    rng.shuffle(lengths)
    return [[rng.randrange(3, 4096) for _ in range(n)] for n in lengths]


def settings(args, dtype: str, graphs: bool) -> dict:
    """Server arguments that both sides share."""
    return {
        "kv_cache_dtype": dtype,
        "nsa_prefill_backend": BACKENDS[dtype],
        "nsa_decode_backend": BACKENDS[dtype],
        "page_size": 64,
        "disable_radix_cache": True,
        "disable_cuda_graph": not graphs,
        "cuda_graph_bs": [1, 4, 16, args.requests],
        "cuda_graph_max_bs": args.requests,
        "max_running_requests": args.requests,
        "max_total_tokens": args.total_tokens,
        "mem_fraction_static": 0.6,
        "context_length": 65536,
        "chunked_prefill_size": 8192,
        "grammar_backend": "none",
        "sampling_backend": "pytorch",
    }


def run(model: Path, work: list, new_tokens: int, overlap: bool, **server_args) -> dict:
    """Serve ``work`` once; outputs, seconds, and the engine's counters."""
    begin = time.time()
    with InprocScheduler(model, overlap=overlap, **server_args) as engine:
        built = time.time()
        outputs = engine.run(work, new_tokens)
        served = time.time()
        coordinator = engine.scheduler.req_to_token_pool.sparse_coordinator
        counters = memory = accepted = None
        if coordinator is not None:
            coordinator.check_idle()
            counters, memory = coordinator.lru.counters.tolist(), coordinator.host_pool.memory
        scheduler = engine.scheduler
        if not scheduler.spec_algorithm.is_none():
            accepted = {
                "tokens": scheduler.spec_total_num_accept_tokens + scheduler.spec_num_accept_tokens,
                "verify_steps": scheduler.spec_total_num_forward_ct + scheduler.spec_num_forward_ct,
            }
    return {
        "outputs": outputs,
        "accepted": accepted,
        "build_s": round(built - begin, 1),
        "serve_s": round(served - built, 1),
        "counters": counters,
        "host_memory": memory,
    }


@contextmanager
def late_loads(fault: str = "") -> Iterator[None]:
    """While open, a layer's rows come late, and so does the next layer's top-k."""
    from sglang.srt.mem_cache.sparsity.nsa_offload.controller import SparseCacheController as Controller

    begin, end = Controller.load_begin, Controller.load_end

    def load_begin(self):
        stream = self._module.stream(self._load_stream) if fault == "load_does_not_wait" else begin(self)
        with stream:
            torch.cuda._sleep(LATE_CYCLES)
        return self._module.stream(self._load_stream)

    def load_end(self):
        if fault != "attention_does_not_wait":
            end(self)
        torch.cuda._sleep(LATE_CYCLES)

    with mock.patch.multiple(Controller, load_begin=load_begin, load_end=load_end):
        yield


def padded_batches(queries: int, limit: int):
    """While open, each eager batch is padded by 1 to 7 requests, up to ``limit``."""
    rng = random.Random(0)
    return mlp_sync.padded(lambda batch: rng.randrange(1, 8), queries, limit=limit)


@contextmanager
def other_ranks(queries: int, limit: int) -> Iterator[None]:
    """While open, batches are padded, loads come late, and an idle forward follows each step.

    Speculation has its own idle forwards, which only several ranks can run: none then.
    """
    step, rng = InprocScheduler.step, random.Random(1)

    def step_and_idle(engine):
        batch = step(engine)
        mlp_sync.idle_forward(engine, rng.randrange(1, 9))
        poison_freed_memory(engine)
        return batch

    idle = mock.patch.object(InprocScheduler, "step", step_and_idle) if queries == 1 else nullcontext()
    with late_loads(), padded_batches(queries, limit), idle:
        yield


def poison_freed_memory(engine) -> None:
    """Overwrite what the idle forward has freed, top-k lists and page tables among it, as another rank's tokens would."""
    with engine.scheduler.device_module.StreamContext(engine.scheduler.forward_stream):
        blocks = [torch.full((rows, 2048), 0x7F7F7F7F, dtype=torch.int32, device="cuda") for rows in (1, 2, 4, 8, 64) * 8]
    del blocks


def compare(left: list, right: list) -> dict:
    """How many requests agree, and the first that does not."""
    wrong = [i for i, (a, b) in enumerate(zip(left, right)) if a != b]
    first = None
    if wrong:
        a, b = left[wrong[0]], right[wrong[0]]
        at = next((i for i, (x, y) in enumerate(zip(a, b)) if x != y), min(len(a), len(b)))
        first = {"request": wrong[0], "token": at}
    return {"equal": len(left) - len(wrong), "of": len(left), "first_difference": first}


def case(args, work, dtype, graphs, overlap, steps, loads, off_runs) -> dict:
    """One row of the result: off against off, then on against off."""
    model = slim_model(args.model, args.layers, drafts=0.5 if steps else 0.0)
    shared = {**settings(args, dtype, graphs), **offload.speculation_args(steps)}
    shared["disable_cuda_graph"] = not graphs
    window = max(args.window, 2048 * (steps + 1))
    row = {"kv_dtype": dtype, "graphs": graphs, "overlap": overlap, "window": window, "draft_tokens": steps, "loads": loads}
    off = []
    for _ in range(off_runs):
        with padded_batches(steps + 1, args.requests) if loads == "ranks" else nullcontext():
            off.append(run(model, work, args.new_tokens, overlap, **shared))
    row["off_vs_off"] = [compare(off[0]["outputs"], other["outputs"]) for other in off[1:]]
    config = {"decode_nsa_kv_offload_config": json.dumps({"window_size": window})}
    stream = other_ranks(steps + 1, args.requests) if loads == "ranks" else late_loads(loads) if loads else nullcontext()
    with stream:
        on = run(model, work, args.new_tokens, overlap, enable_decode_nsa_kv_offload=True, **config, **shared)
    row["on_vs_off"] = compare(off[0]["outputs"], on["outputs"])
    row["distinct_tokens"] = len(set(itertools.chain(*off[0]["outputs"])))
    row["counters"], row["host_memory"] = on["counters"], on["host_memory"]
    row["accepted"] = {"off": off[0]["accepted"], "on": on["accepted"]}
    row["seconds"] = {side: [r["build_s"], r["serve_s"]] for side, r in (("off", off[0]), ("on", on))}
    return row


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--model", type=Path, default=Path("build/models/slim"))
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--requests", type=int, default=64)
    parser.add_argument("--max-len", type=int, default=32768)
    parser.add_argument("--min-len", type=int, default=1)
    parser.add_argument("--total-tokens", type=int, default=800 * 1024)
    parser.add_argument("--new-tokens", type=int, default=200)
    parser.add_argument("--window", type=int, default=4096)
    parser.add_argument("--off-runs", type=int, default=3, help="runs without offloading in the first case; 1 in the others")
    parser.add_argument("--cases", nargs="*", default=["all"], help="like fp8_e4m3:graphs:overlap, or with :3 behind it")
    args = parser.parse_args()

    work = prompts(args.requests, args.max_len, seed=0, min_len=args.min_len)
    rows = []
    names = args.cases
    if names == ["all"]:
        names = [":".join(c) for c in itertools.product(BACKENDS, ("graphs", "eager"), ("overlap", "normal"))]
        names += [f"{dtype}:{graphs}:overlap:3" for dtype in BACKENDS for graphs in ("graphs", "eager")]
        names += [f"{dtype}:graphs:overlap:{steps}:late" for dtype in BACKENDS for steps in (0, 3)]
        names += [f"fp8_e4m3:eager:overlap:0:{loads}" for loads in ("late", *LOAD_FAULTS)]
        names += [f"{dtype}:{graphs}:overlap:0:ranks" for dtype in BACKENDS for graphs in ("graphs", "eager")]
        names += ["fp8_e4m3:eager:overlap:3:ranks"]
    with deterministic_topk():
        for index, name in enumerate(names):
            parts = name.split(":")
            dtype, graphs, loop, steps, loads = parts + ["0", ""][len(parts) - 3 :]
            off_runs = args.off_runs if index == 0 else 1
            row = case(args, work, dtype, graphs == "graphs", loop == "overlap", int(steps), loads, off_runs)
            row = {"gpu": torch.cuda.get_device_name(), "requests": args.requests, "min_len": args.min_len, "max_len": args.max_len, "new_tokens": args.new_tokens, **row}
            rows.append(row)
            print(json.dumps(row), flush=True)
            args.out.write_text(json.dumps(rows, indent=1) + "\n")
    if any((row["on_vs_off"]["equal"] == row["on_vs_off"]["of"]) == (row["loads"] in LOAD_FAULTS) for row in rows):
        raise SystemExit("tokens differ, or do not with a fault")
    if any(row["accepted"]["off"] != row["accepted"]["on"] for row in rows if row["loads"] not in LOAD_FAULTS):
        raise SystemExit("other drafts were accepted")


if __name__ == "__main__":
    main()
