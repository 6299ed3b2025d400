"""A lone decode node to measure: dense, HiSparse or offloading, requests whose KV comes from nowhere, rounds of steps."""

import argparse
import contextlib
import json
import time
from pathlib import Path
from typing import Optional

import harness  # noqa: F401  (sets the environment; before sglang and torch)

import torch
from exactness import BACKENDS
from replayed_topk import lists_of, replayed_topk
from harness.delivery import FAKE_HOST
from harness.environment import ON_GPU
from harness.scheduler import InprocScheduler

TOP_K, PAGE = 2048, 64
KV_BYTES, INDEX_BYTES = {"fp8_e4m3": 656, "bfloat16": 1152}, 132  # of a token in a layer
DEVICE = "cuda" if ON_GPU else "cpu"
KV_MODULES = ("sglang.srt.mem_cache", "sglang.srt.managers.hisparse", "sglang.jit_kernel")


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
        config = {"window_size": args.window}
        if impl == "ours_pinned":
            config["host_memory"] = "pinned"  # as a decode node over mooncake or nixl has it
        more["decode_nsa_kv_offload_config"] = json.dumps(config)
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
    """Decode steps of one measurement, and some to spare."""
    return args.warmup + args.steps * args.rounds + 5


def play(replay, args, miss_rate: float, seed: int = 0) -> None:
    """Begin with other lists, of as many steps as one measurement has."""
    synchronize()
    replay.play(lists_of(steps_of(args), max(args.batches), TOP_K, args.context, miss_rate, seed))


def miss_rate_of(counts: list, replayed: Optional[float]) -> float:
    """Of hits, ring hits and misses.

    Raises:
        RuntimeError: lists were to be replayed, and were not.
    """
    rate = round(counts[2] / sum(counts), 4)
    if replayed is not None and abs(rate - round(TOP_K * replayed) / TOP_K) > 0.002:
        raise RuntimeError(f"{rate:.2%} of the top-k missed where lists with {replayed:.2%} were replayed")
    return rate


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
