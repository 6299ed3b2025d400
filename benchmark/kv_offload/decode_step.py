"""One decode step of a lone decode node: dense, HiSparse and offloading in one run on one GPU.

    HARNESS_DEVICE=cuda PYTHONPATH=test python benchmark/kv_offload/decode_step.py --out decode_step.json

With ``--miss-rates`` the top-k is replayed (`replayed_topk.py`), in every implementation alike; 0 is the cost without copies.
Without, index keys are filled at random, since the fake transfer backend delivers no bytes: queries then select rows all over
the context. Either way the misses are counted on the GPU and reported.
"""

import argparse
import contextlib
import json
import statistics
import time
from pathlib import Path

import harness  # noqa: F401  (sets the environment; before sglang and torch)

import torch
from exactness import BACKENDS, slim_model
from replayed_topk import lists_of, replayed_topk
from harness.scheduler import InprocScheduler

FAKE_HOST = "2.2.2.2"


def impl_args(impl: str, args) -> dict:
    if impl == "hisparse":
        host_ratio = {"top_k": 2048, "device_buffer_size": args.window, "host_to_device_ratio": 2}
        return {"enable_hisparse": True, "hisparse_config": json.dumps(host_ratio)}
    if impl.startswith("ours"):
        swap_kernels = impl.partition("-")[2] or "triton"
        config = json.dumps({"window_size": args.window, "swap_kernels": swap_kernels})
        return {"enable_decode_nsa_kv_offload": True, "decode_nsa_kv_offload_config": config}
    return {}


def randomize_index_keys(pool) -> None:
    """fp8 keys of any finite value and scales near one, the same in every implementation."""
    generator = torch.Generator(device=pool.device).manual_seed(0)
    for buffer in pool.index_k_with_scale_buffer:
        keys = buffer[:, : 64 * 128]
        keys.copy_(torch.randint(0, 112, keys.shape, generator=generator, device=pool.device, dtype=torch.uint8))
        buffer[:, 64 * 128 :].view(torch.float32).fill_(0.01)


@contextlib.contextmanager
def chosen_topk(miss_rate, args):
    """What sets the top-k of a run; yields None where the indexer does."""
    if miss_rate is None:
        yield None
        return
    steps = args.warmup + args.steps * args.rounds + 5
    lists = lists_of(steps, args.batch, 2048, args.context, miss_rate).cuda()
    with replayed_topk(lists, args.layers) as replay:
        yield replay


def measure(impl: str, model: Path, miss_rate, args) -> dict:
    begin = time.time()
    with chosen_topk(miss_rate, args) as replay, InprocScheduler(
        model,
        overlap=True,
        kv_cache_dtype=args.dtype,
        nsa_prefill_backend=BACKENDS[args.dtype],
        nsa_decode_backend=BACKENDS[args.dtype],
        page_size=64,
        disable_radix_cache=True,
        disaggregation_mode="decode",
        disaggregation_transfer_backend="fake",
        cuda_graph_bs=[args.batch],
        cuda_graph_max_bs=args.batch,
        max_running_requests=args.batch,
        max_total_tokens=args.batch * (args.context + 1024),
        mem_fraction_static=0.85,
        context_length=args.context + 2048,
        grammar_backend="none",
        sampling_backend="pytorch",
        **impl_args(impl, args),
    ) as engine:
        randomize_index_keys(engine.kv_pool)
        built = time.time()
        prompt = list(range(3, 3 + 4000)) * (args.context // 4000 + 1)
        for room in range(args.batch):
            engine.submit(prompt[: args.context], 900, bootstrap_host=FAKE_HOST, bootstrap_room=room)
        engine.step_until(lambda: engine.scheduler.running_batch.batch_size() == args.batch)
        if replay is not None:
            torch.cuda.synchronize()
            replay.restart()
        for _ in range(args.warmup):
            engine.step()
        coordinator = engine.scheduler.req_to_token_pool.sparse_coordinator
        before = coordinator.lru.counters.clone() if coordinator is not None else None
        times = []
        for _ in range(args.rounds):
            torch.cuda.synchronize()
            start = time.perf_counter()
            for _ in range(args.steps):
                engine.step()
            torch.cuda.synchronize()
            times.append((time.perf_counter() - start) / args.steps * 1e3)
        row = {
            "impl": impl,
            "replayed_miss_rate": miss_rate,
            "gpu": torch.cuda.get_device_name(),
            "batch": args.batch,
            "context": args.context,
            "layers": args.layers,
            "top_k": 2048,
            "window": args.window,
            "kv_dtype": args.dtype,
            "step_ms": round(statistics.median(times), 3),
            "step_ms_rounds": [round(t, 3) for t in times],
            "tokens_per_s": round(args.batch / statistics.median(times) * 1e3),
            "build_s": round(built - begin, 1),
        }
        if before is not None:
            hits, ring, misses = (coordinator.lru.counters - before).sum(0).tolist()
            row["miss_rate"] = round(misses / (hits + ring + misses), 4)
        engine.abort(all_requests=True)
        engine.drain()
    return row


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--model", type=Path, default=Path("build/models/slim"))
    parser.add_argument("--layers", type=int, default=20)
    parser.add_argument("--batch", type=int, default=64)
    parser.add_argument("--context", type=int, default=32768)
    parser.add_argument("--window", type=int, default=4096)
    parser.add_argument("--dtype", default="fp8_e4m3")
    parser.add_argument("--warmup", type=int, default=30)
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--miss-rates", nargs="*", type=float, help="replay top-k lists with these; unset: random index keys")
    parser.add_argument("--impls", nargs="*", default=["dense", "hisparse", "ours-triton", "ours-cuda"])
    args = parser.parse_args()
    model = slim_model(args.model, args.layers)
    rows = []
    for miss_rate in args.miss_rates or [None]:
        for impl in args.impls:
            rows.append(measure(impl, model, miss_rate, args))
            print(json.dumps(rows[-1]), flush=True)
            args.out.write_text(json.dumps(rows, indent=1) + "\n")


if __name__ == "__main__":
    main()
