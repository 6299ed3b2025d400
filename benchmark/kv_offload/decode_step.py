"""One decode step of a lone decode node: dense, HiSparse and offloading in one run on one GPU.

    HARNESS_DEVICE=cuda PYTHONPATH=test python benchmark/kv_offload/decode_step.py --miss-rates 0 0.02 0.1 --out decode_step.json

With ``--miss-rates`` the top-k is replayed (`replayed_topk.py`), in every implementation alike; 0 is the cost without copies. One
engine an implementation serves all batches and miss rates. Without, index keys are filled at random, since the fake transfer backend
delivers no bytes: queries then select rows all over the context. Ours counts its misses on the GPU, and they are reported.
"""

import argparse
import contextlib
import json
import statistics
import time
from pathlib import Path
from typing import Iterator

import harness  # noqa: F401  (sets the environment; before sglang and torch)

import torch
from exactness import BACKENDS, slim_model
from replayed_topk import lists_of, replayed_topk
from harness.environment import ON_GPU
from harness.scheduler import InprocScheduler

FAKE_HOST = "2.2.2.2"
TOP_K, PAGE = 2048, 64
KV_BYTES, INDEX_BYTES = {"fp8_e4m3": 656, "bfloat16": 1152}, 132  # of a token in a layer
DEVICE = "cuda" if ON_GPU else "cpu"
KV_MODULES = ("sglang.srt.mem_cache", "sglang.srt.managers.hisparse", "sglang.jit_kernel")
FIRST_STEPS = 8  # requests whose first decode step is timed


def impl_args(impl: str, args, requests: int, new_tokens: int) -> dict:
    """Server arguments of an implementation with room for so many requests, and no more."""
    slots = args.context + new_tokens + PAGE
    if impl == "hisparse":
        # Its pool is sized in device slots: a buffer and a page for each request, and a free page, without which it would retract
        # one, which it cannot. Index keys come with the logical slots, a whole multiple of them; the cheaper of two is taken.
        least = args.window + 2 * PAGE

        def device_slots(ratio: int) -> int:
            return -(-max(requests * least, -(-requests * slots // ratio)) // PAGE) * PAGE

        ratios = (max(1, slots // least), slots // least + 1)
        ratio = min(ratios, key=lambda ratio: device_slots(ratio) * (KV_BYTES[args.dtype] + ratio * INDEX_BYTES))
        config = {"top_k": TOP_K, "device_buffer_size": args.window, "host_to_device_ratio": ratio}
        return {
            "enable_hisparse": True,
            "hisparse_config": json.dumps(config),
            "max_total_tokens": device_slots(ratio),
        }
    more = {"max_total_tokens": requests * slots}
    if impl.startswith("ours"):
        more["enable_decode_nsa_kv_offload"] = True
        more["decode_nsa_kv_offload_config"] = json.dumps({"window_size": args.window})
    return more


def randomize_index_keys(pool) -> None:
    """fp8 keys of any finite value and scales near one, the same in every implementation."""
    generator = torch.Generator(device=pool.device).manual_seed(0)
    for buffer in pool.index_k_with_scale_buffer:
        keys = buffer[:, : 64 * 128]
        keys.copy_(torch.randint(0, 112, keys.shape, generator=generator, device=pool.device, dtype=torch.uint8))
        buffer[:, 64 * 128 :].view(torch.float32).fill_(0.01)


def pool_bytes(engine) -> int:
    """Device bytes of everything that holds KV or finds it: pools, index keys, tables, staging, as allocated; no host pool."""
    runner, scheduler = engine.model_runner, engine.scheduler
    roots = [runner.token_to_kv_pool, runner.token_to_kv_pool_allocator, runner.req_to_token_pool]
    roots.append(getattr(scheduler, "hisparse_coordinator", None))
    device, seen, storages, open_objects = torch.device(engine.kv_pool.device).type, set(), {}, roots
    host = set()  # on a CPU, all memory is of one type
    while open_objects:
        thing = open_objects.pop()
        if id(thing) in seen:
            continue
        seen.add(id(thing))
        if isinstance(thing, torch.Tensor):
            if thing.device.type == device and not isinstance(thing, torch.nn.Parameter):
                storage = thing.untyped_storage()
                storages[storage.data_ptr()] = storage.nbytes()
        elif type(thing).__name__.endswith("PoolHost"):
            host |= {t.untyped_storage().data_ptr() for t in vars(thing).values() if isinstance(t, torch.Tensor)}
        elif isinstance(thing, (list, tuple, set)):
            open_objects += thing
        elif isinstance(thing, dict):
            open_objects += thing.values()
        elif type(thing).__module__.startswith(KV_MODULES):
            open_objects += getattr(thing, "__dict__", {}).values()
    return sum(size for pointer, size in storages.items() if pointer not in host)


@contextlib.contextmanager
def chosen_topk(args):
    """What sets the top-k of a run; yields None where the indexer does."""
    if args.miss_rates is None:
        yield None
        return
    # Filled before each measurement; in graphs it is read from the same place.
    lists = torch.zeros((steps_of(args), max(args.batches), TOP_K), dtype=torch.int32, device=DEVICE)
    with replayed_topk(lists, args.layers) as replay:
        yield replay


def steps_of(args) -> int:
    return args.warmup + args.steps * args.rounds + 5


def tokens_made(num_batches: int, args) -> int:
    """Tokens that the first request makes while so many batches are measured at every miss rate."""
    return FIRST_STEPS + num_batches * len(args.miss_rates or [None]) * steps_of(args) + 64


def decode_node(impl: str, model: Path, args, batches: list, new_tokens: int, **more) -> InprocScheduler:
    """A lone decode node with room for the largest batch, and CUDA graphs of each."""
    return InprocScheduler(
        model,
        overlap=True,
        kv_cache_dtype=args.dtype,
        nsa_prefill_backend=BACKENDS[args.dtype],
        nsa_decode_backend=BACKENDS[args.dtype],
        page_size=PAGE,
        disable_radix_cache=True,
        disaggregation_mode="decode",
        disaggregation_transfer_backend="fake",
        num_reserved_decode_tokens=1,  # the pool has room for what each request will make
        cuda_graph_bs=batches,
        cuda_graph_max_bs=batches[-1],
        max_running_requests=batches[-1],
        mem_fraction_static=0.85 if ON_GPU else 0.1,
        context_length=args.context + new_tokens + PAGE,
        grammar_backend="none",
        sampling_backend="pytorch",
        **impl_args(impl, args, batches[-1], new_tokens),
        **more,
    )


def prompt_of(context: int) -> list:
    return (list(range(3, 4003)) * (context // 4000 + 1))[:context]


def submit(engine, prompt: list, new_tokens: int, room: int) -> str:
    """A request whose KV comes from nowhere; its rid."""
    return engine.submit(prompt, new_tokens, bootstrap_host=FAKE_HOST, bootstrap_room=room)


def run_batch(engine, prompt: list, new_tokens: int, rooms: range) -> None:
    """Submit a request for each room, and step until they and those of the rooms below run."""
    for room in rooms:
        submit(engine, prompt, new_tokens, room)
    engine.step_until(lambda: engine.scheduler.running_batch.batch_size() == rooms.stop)


def synchronize() -> None:
    torch.get_device_module(DEVICE).synchronize()


def measure(impl: str, model: Path, args, new_tokens: int = 0) -> Iterator[dict]:
    """Rows of one implementation: every batch at every miss rate.

    Args:
        new_tokens: of a request; 0 for as many as will be made.
    """
    begin = time.time()
    batches, rates = sorted(args.batches), args.miss_rates or [None]
    new_tokens = new_tokens or tokens_made(len(batches), args)
    with chosen_topk(args) as replay, decode_node(impl, model, args, batches, new_tokens) as engine:
        randomize_index_keys(engine.kv_pool)
        common = {
            "impl": impl,
            "gpu": torch.cuda.get_device_name() if ON_GPU else "none",
            "context": args.context,
            "layers": args.layers,
            "top_k": TOP_K,
            "window": args.window,
            "kv_dtype": args.dtype,
            "pool_gb": round(pool_bytes(engine) / 1e9, 3),
            "build_s": round(time.time() - begin, 1),
        }
        if replay is not None:
            replay.play(lists_of(steps_of(args), batches[-1], TOP_K, args.context, 0.0))
        prompt, running, first_step = prompt_of(args.context), 0, []
        for batch in batches:
            while running < min(batch, FIRST_STEPS):
                start = time.perf_counter()
                rid = submit(engine, prompt, new_tokens, running)
                engine.step_until(lambda: len(engine.outputs[rid]) > 1)
                first_step.append((time.perf_counter() - start) * 1e3)
                running += 1
            run_batch(engine, prompt, new_tokens, range(running, batch))
            running = batch
            for seed, miss_rate in enumerate(rates):
                if replay is not None:
                    synchronize()
                    replay.play(lists_of(steps_of(args), batches[-1], TOP_K, args.context, miss_rate, seed))
                times, counts = time_steps(engine, args)
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
                    row["miss_rate"] = round(counts[2] / sum(counts), 4)
                yield row
        engine.abort(all_requests=True)
        engine.drain()


def round_ms(engine, steps: int) -> float:
    """Milliseconds a step."""
    synchronize()
    start = time.perf_counter()
    for _ in range(steps):
        engine.step()
    synchronize()
    return (time.perf_counter() - start) / steps * 1e3


def time_steps(engine, args) -> tuple:
    """Milliseconds a step of each round; hits, ring hits and misses of all of them where they are counted."""
    for _ in range(args.warmup):
        engine.step()
    coordinator = getattr(engine.scheduler.req_to_token_pool, "sparse_coordinator", None)  # stock SGLang has none
    before = coordinator.lru.counters.clone() if coordinator is not None else None
    times = [round_ms(engine, args.steps) for _ in range(args.rounds)]
    counts = (coordinator.lru.counters - before).sum(0).tolist() if coordinator is not None else None
    return times, counts


def parser_of(doc: str) -> argparse.ArgumentParser:
    """What a server is and how its steps are timed."""
    parser = argparse.ArgumentParser(description=doc.splitlines()[0])
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--model", type=Path, default=Path("build/models/slim"))
    parser.add_argument("--layers", type=int, default=20)
    parser.add_argument("--window", type=int, default=4096)
    parser.add_argument("--dtype", default="fp8_e4m3")
    parser.add_argument("--warmup", type=int, default=30)
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--miss-rates", nargs="*", type=float, help="replay top-k lists with these; unset: random index keys")
    return parser


def main() -> None:
    parser = parser_of(__doc__)
    impls = ["dense", "ours", "hisparse"]
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
