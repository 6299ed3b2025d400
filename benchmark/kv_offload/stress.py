"""Random lives of requests on a GPU with stamped rows: graphs, overlap, tiny pools, delayed copies, planted faults.

    HARNESS_DEVICE=cuda PYTHONPATH=test python benchmark/kv_offload/stress.py --out stress.json

The scenarios run in one child process, so that its exit and the release of the GPU can be timed. A planted fault must be
caught by the stamps; a scenario without one must not.
"""

import argparse
import json
import os
import random
import subprocess
import sys
import time
from contextlib import ExitStack
from pathlib import Path
from unittest import mock

FAULTS = (
    "layer_offset_lost",
    "host_and_device_slot_swapped",
    "ring_of_one",
    "padded_row_not_masked",
    "write_back_skipped",
    "int32_address",
)
# What waits for the GPU, and must be seen to.
WAITS = ("upload_of_pageable_memory", "admission_waits_for_the_forward")
LONE_LENGTHS, LONE_WINDOW = [32 * 1024] * 64 + [128 * 1024] * 8, 4096
SLEEP_STORE_CYCLES = 4_000_000
# Host slots below this lie within the first 2^31 bytes of a layer of 656-byte rows.
FIRST_HIGH_SLOT = (1 << 31) // 656 // 64 * 64 + 64


def plant(fault: str, stack: ExitStack) -> None:
    """Replace a part by a faulty one until ``stack`` closes."""
    import torch
    from sglang.srt.mem_cache.sparsity.nsa_offload import host_pool
    from sglang.srt.mem_cache.sparsity.nsa_offload.controller import SparseCacheController as Controller
    from sglang.srt.mem_cache.sparsity.nsa_offload.coordinator import NSAOffloadCoordinator as Coordinator
    from sglang.srt.mem_cache.sparsity.nsa_offload.sizing import OffloadSizes

    load, begin = Controller.load_layer, Coordinator.decode_begin

    def lost(self, layer, queue):
        load(self, 0, queue)

    def swapped(self, layer, queue):
        host_rows, device_rows = self._host_kv.shape[1], self._device_kv[0].shape[0]
        host_slots = queue.host_slots.clone()
        queue.host_slots.copy_(queue.device_slots % host_rows)
        queue.device_slots.copy_(torch.where(host_slots < device_rows, host_slots, 0))
        load(self, layer, queue)

    def wrapped(self, layer, queue):
        queue.host_slots.remainder_((1 << 31) // self._row_bytes)
        load(self, layer, queue)

    def unmasked(self, batch_size, num_real, *args):
        begin(self, batch_size, batch_size, *args)

    # The faults are in the list of misses: gather by it, however many they are.
    stack.enter_context(mock.patch.multiple(host_pool, ORDER_MIN_ROWS=1 << 30, ORDER_MIN_ROWS_MANAGED=1 << 30))
    replaced = {
        "layer_offset_lost": (Controller, "load_layer", lost),
        "host_and_device_slot_swapped": (Controller, "load_layer", swapped),
        "ring_of_one": (OffloadSizes, "ring_slots", property(lambda self: 1)),
        "padded_row_not_masked": (Coordinator, "decode_begin", unmasked),
        "write_back_skipped": (Coordinator, "forward_end", lambda *a: None),
        "int32_address": (Controller, "load_layer", wrapped),
    }[fault]
    stack.enter_context(mock.patch.object(*replaced))


def delay_copies(stack: ExitStack) -> None:
    """Put a spin kernel before every copy, either way: what does not wait for it then sees stale rows."""
    import torch
    from exactness import late_loads
    from sglang.srt.mem_cache.sparsity.nsa_offload.controller import SparseCacheController as Controller

    after = Controller._after_current

    def delayed(self, stream, *inputs):
        context = after(self, stream, *inputs)
        with context:
            torch.cuda._sleep(SLEEP_STORE_CYCLES)
        return self._module.stream(stream)

    stack.enter_context(mock.patch.object(Controller, "_after_current", delayed))
    stack.enter_context(late_loads())


# Calls of the scheduler's thread and of a forward's launch; none of them may wait for the GPU.
CALLS = (
    "prepare_extend",
    "prepare_decode",
    "on_request_end",
    "hold_transfer",
    "forward_end",
    "forward_begin",
    "decode_begin",
    "swap_begin",
    "attention_begin",
    "attention_end",
)


class Waited(AssertionError):
    """A call waited for the GPU."""


def forbid_waits(stack: ExitStack) -> dict:
    """Until ``stack`` closes each of ``CALLS`` raises where it waits for the GPU; returns how often each was called."""
    import torch
    from sglang.srt.mem_cache.sparsity.nsa_offload.coordinator import NSAOffloadCoordinator as Coordinator

    counts = dict.fromkeys(CALLS, 0)

    def waits(*args, **kwargs):
        raise Waited("a stream or an event was waited for")

    def guarded(name, call):
        def guard(*args, **kwargs):
            counts[name] += 1
            mode = torch.cuda.get_sync_debug_mode()
            torch.cuda.set_sync_debug_mode("error")
            try:
                with mock.patch.object(torch.cuda.Event, "synchronize", waits):
                    with mock.patch.object(torch.cuda.Stream, "synchronize", waits):
                        with mock.patch.object(torch.cuda, "synchronize", waits):
                            return call(*args, **kwargs)
            except RuntimeError as error:
                if "synchronizing CUDA operation" in str(error):
                    raise Waited(str(error)) from error
                raise
            finally:
                torch.cuda.set_sync_debug_mode(mode)

        return guard

    for name in CALLS:
        stack.enter_context(mock.patch.object(Coordinator, name, guarded(name, getattr(Coordinator, name))))
    return counts


def plant_wait(wait: str, stack: ExitStack) -> None:
    """Replace a call by one that waits, until ``stack`` closes."""
    import torch
    from sglang.srt.mem_cache.sparsity.nsa_offload import coordinator, staging

    def pageable(values, device):
        return torch.tensor(values, dtype=torch.int64).to(device)

    def block(self, decode_req):
        self.controller.synchronize(forwards=True)

    if wait == "upload_of_pageable_memory":
        for module in (coordinator, staging):
            stack.enter_context(mock.patch.object(module, "upload", pageable))
    else:
        stack.enter_context(mock.patch.object(coordinator.NSAOffloadCoordinator, "hold_transfer", block))


def nothing_waits(args) -> dict:
    """A decode node whose requests come, go and are retracted, and no call of ``CALLS`` may wait."""
    import lone_node
    from exactness import slim_model
    from turnover import Traffic

    options = argparse.Namespace(context=2000, window=LONE_WINDOW, dtype=args.dtype)
    result, begin = {"caught": None, "retracted": 0}, time.time()
    with ExitStack() as stack:
        if args.wait:
            plant_wait(args.wait, stack)
        counts = forbid_waits(stack)
        model = slim_model(args.model, args.layers)
        engine = stack.enter_context(lone_node.decode_node("ours", model, options, [16, 32], 200))
        lone_node.randomize_index_keys(engine.kv_pool)
        traffic = Traffic(engine, lone_node.prompt_of(2000), 32, room=0)
        try:
            for _ in range(args.steps // 20):
                traffic.steps(20)
                if engine.scheduler.running_batch.batch_size() > 2:
                    result["retracted"] += len(engine.retract(1))
            engine.abort(all_requests=True)
            engine.drain()
        except Waited as error:
            result["caught"] = str(error)
    return {**result, "calls": counts, "seconds": round(time.time() - begin, 1)}


def live(engine, stamps, args) -> dict:
    """Submit, step, abort and retract at random; check stamps as it goes."""
    from harness import mlp_sync

    rng = random.Random(args.seed)
    done = {"submitted": 0, "aborted": 0, "retracted": 0, "checked_rows": 0}
    for step in range(args.steps):
        waiting = engine.unfinished()
        if len(waiting) < 12 and rng.random() < 0.2:
            length = rng.choice((1, 64, 2047, 2049)) if rng.random() < 0.2 else rng.randrange(1, args.max_len)
            prompt = [rng.randrange(3, args.vocab) for _ in range(length)]
            engine.submit(prompt, rng.choice((1, 5, 70, 200)))
            done["submitted"] += 1
        if waiting and rng.random() < 0.02:
            engine.abort(rng.choice(waiting))
            done["aborted"] += 1
        if rng.random() < 0.01 and engine.scheduler.running_batch.batch_size() > 2:
            done["retracted"] += len(engine.retract(1))
        engine.step()
        if args.ranks and rng.random() < 0.3:
            mlp_sync.idle_forward(engine, rng.randrange(1, 9))
            done["idle_forwards"] = done.get("idle_forwards", 0) + 1
        if step % 20 == 0:
            done["checked_rows"] += sum(stamps.check(engine, host=step % 100 == 0, max_host_rows=8192))
    done["checked_rows"] += sum(stamps.check(engine, host=True))
    engine.drain()
    return done


def long_requests(args) -> dict:
    """A decode node alone, index keys at random: 64 requests of 32K and 8 of 128K, half of them make half as many tokens.

    No stamps; SGLang's and the coordinator's leak checks raise where something is left.
    """
    import lone_node
    from exactness import slim_model

    lengths = LONE_LENGTHS
    options = argparse.Namespace(context=max(lengths), window=LONE_WINDOW, dtype=args.dtype)
    begin, new_tokens = time.time(), args.steps + 8
    with lone_node.decode_node("ours", slim_model(args.model, args.layers), options, [len(lengths)], new_tokens) as engine:
        lone_node.randomize_index_keys(engine.kv_pool)
        for room, length in enumerate(lengths):
            wanted = new_tokens if room % 2 else new_tokens // 2
            lone_node.submit(engine, lone_node.prompt_of(length), wanted, room)
        engine.step_until(lambda: engine.scheduler.running_batch.batch_size() == len(lengths))
        for _ in range(args.steps):
            engine.step()
        engine.drain()
        engine.idle_checks()
        coordinator = engine.scheduler.req_to_token_pool.sparse_coordinator
        coordinator.check_idle()
        counters, memory = coordinator.lru.counters.tolist(), coordinator.host_pool.memory
    misses = sum(layer[2] for layer in counters) / sum(map(sum, counters))
    row = {"requests": len(lengths), "host_memory": memory, "miss_rate": round(misses, 4), "counters": counters}
    return {**row, "seconds": round(time.time() - begin, 1)}


def scenario(args) -> dict:
    """Run one scenario in this process."""
    if args.lone:
        return long_requests(args)
    if args.no_waits:
        return nothing_waits(args)
    from exactness import settings, slim_model
    from harness import mlp_sync, offload
    from harness.scheduler import InprocScheduler
    from harness.stamps import StampError, Stamps

    begin = time.time()
    model = slim_model(args.model, args.layers)
    more = {**settings(args, args.dtype, not args.eager), **offload.offload_args(2048)}
    more.update(cuda_graph_bs=[1, 2, 4, 8], cuda_graph_max_bs=8, max_running_requests=8, chunked_prefill_size=4096)
    result = {"caught": None}
    with ExitStack() as stack:
        stamps = stack.enter_context(Stamps())
        if args.fault:
            plant(args.fault, stack)
        if args.delay:
            delay_copies(stack)
        else:
            result["calls"] = forbid_waits(stack)
        if args.ranks:
            rng, padded = random.Random(args.seed), []
            stack.enter_context(mlp_sync.padded(lambda batch: rng.choice((0, 1, 7)), seen=padded, limit=8))
        engine = stack.enter_context(InprocScheduler(model, overlap=args.loop == "overlap", **more))
        allocator = engine.scheduler.token_to_kv_pool_allocator
        if args.high:
            # SGLang's idle check would take the occupied slots for a leak.
            lenient = {"SGLANG_ENABLE_STRICT_MEM_CHECK_DURING_IDLE": "0"}
            stack.enter_context(mock.patch.dict(os.environ, lenient))
        held = allocator.alloc(FIRST_HIGH_SLOT) if args.high else None
        try:
            result.update(live(engine, stamps, args))
            if held is not None:
                allocator.free(held)
                held = None
            offload.check_idle(engine)
        except StampError as error:
            result["caught"] = str(error)
        result["counters"] = offload.coordinator(engine).lru.counters.tolist()
        if args.ranks:
            result["padded_batches"] = {mode: padded.count(mode) for mode in set(padded)}
    return {**result, "seconds": round(time.time() - begin, 1)}


def plan(steps: int) -> list:
    """Name, flags, and whether the stamps must catch something."""
    high = ["--high", "--layers", "2", "--total-tokens", str(FIRST_HIGH_SLOT + 65536)]
    rows = [
        ("graphs, overlap", ["--steps", str(steps)], False),
        ("graphs, overlap, delayed copies", ["--steps", str(steps), "--delay"], False),
        ("graphs, overlap, bf16, delayed copies", ["--steps", str(steps // 3), "--delay", "--dtype", "bfloat16"], False),
        ("eager, normal", ["--steps", str(steps // 5), "--eager", "--loop", "normal"], False),
        ("graphs, overlap, idle and padded, delayed copies", ["--steps", str(steps // 2), "--delay", "--ranks"], False),
        ("eager, overlap, idle and padded, delayed copies", ["--steps", str(steps // 2), "--delay", "--ranks", "--eager"], False),
        ("rows beyond 2^31 bytes", ["--steps", str(min(300, steps)), *high], False),
    ]
    rows.append(("lone decode node, 64 x 32K and 8 x 128K", ["--steps", str(min(500, steps)), "--lone"], False))
    rows.append(("lone decode node, nothing waits", ["--steps", str(min(400, steps)), "--no-waits"], False))
    for wait in WAITS:
        rows.append((f"wait: {wait}", ["--steps", str(min(400, steps)), "--no-waits", "--wait", wait], True))
    for fault in FAULTS:
        flags = ["--steps", str(min(600, steps)), "--fault", fault, "--ranks"]
        rows.append((f"fault: {fault}", flags + (high if fault == "int32_address" else []), True))
    return rows


def children(args, parser) -> None:
    """Run every scenario of the plan, one after another, in this process."""
    import harness  # noqa: F401  (sets the environment; before sglang and torch)

    for name, flags, must_catch in plan(args.steps):
        if args.only and not any(part in name for part in args.only):
            continue
        shared = ["--model", str(args.model), "--max-len", str(args.max_len)]
        chosen = parser.parse_args([*shared, *flags])
        row = {"scenario": name, "steps": chosen.steps, "delayed": chosen.delay, **scenario(chosen)}
        print(json.dumps({**row, "good": bool(row.get("caught")) == must_catch}), flush=True)


def gpu_memory_mb() -> int:
    query = ["nvidia-smi", "--query-gpu=memory.used", "--format=csv,noheader,nounits"]
    return int(subprocess.run(query, capture_output=True, text=True).stdout.split()[0])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, default=Path("stress.json"))
    parser.add_argument("--model", type=Path, default=Path("build/models/slim"))
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--requests", type=int, default=8)
    parser.add_argument("--total-tokens", type=int, default=40960, help="of all requests; small, so that decode retracts")
    parser.add_argument("--max-len", type=int, default=9000)
    parser.add_argument("--vocab", type=int, default=4096)
    parser.add_argument("--dtype", default="fp8_e4m3")
    parser.add_argument("--loop", default="overlap", choices=("overlap", "normal"))
    parser.add_argument("--eager", action="store_true")
    parser.add_argument("--steps", type=int, default=2000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--fault", choices=FAULTS)
    parser.add_argument("--delay", action="store_true")
    parser.add_argument("--ranks", action="store_true", help="what other data-parallel ranks cause: idle forwards, padded batches")
    parser.add_argument("--high", action="store_true", help="occupy all slots below 2^31 bytes first")
    parser.add_argument("--lone", action="store_true", help="a decode node whose transfers are none")
    parser.add_argument("--no-waits", action="store_true", help="a decode node whose requests come and go")
    parser.add_argument("--wait", choices=WAITS)
    parser.add_argument("--child", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--only", nargs="*", help="scenarios whose name has one of these in it")
    args = parser.parse_args()
    if args.child:
        children(args, parser)
        return

    idle_mb, rows = gpu_memory_mb(), []
    command = [sys.executable, __file__, "--child", *sys.argv[1:]]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as child:
        for line in child.stdout:
            if line.startswith("{"):
                rows.append(json.loads(line))
                print(line, end="", flush=True)
                args.out.write_text(json.dumps(rows, indent=1) + "\n")
    ended = time.time()
    while gpu_memory_mb() > idle_mb + 200 and time.time() < ended + 30:
        time.sleep(0.1)
    rows.append({"scenario": "exit", "exit_code": child.returncode, "gpu_free_s": round(time.time() - ended, 1)})
    print(json.dumps(rows[-1]), flush=True)
    args.out.write_text(json.dumps(rows, indent=1) + "\n")
    bad = [row["scenario"] for row in rows[:-1] if not row["good"]]
    if bad or child.returncode or rows[-1]["gpu_free_s"] > 5:
        raise SystemExit(f"not as expected: {bad or rows[-1]}")


if __name__ == "__main__":
    main()
