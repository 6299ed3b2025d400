"""A request that lost its slots and gets others: what its rows' way out and back costs, beside computing them again.

    HARNESS_DEVICE=cuda PYTHONPATH=test python benchmark/kv_offload/retraction.py --out benchmark/kv_offload/results/h200/retraction.json

A decode node copies host rows and index keys of a retracted request to pageable memory and back (`get_cpu_copy`,
`load_cpu_copy`). A colocated server prefills again; so is the other figure taken here. The slim model's layers compute much less
than a real model's, so its prefill is the least that computing again can cost.
"""

import json
import statistics
import time
from pathlib import Path

import harness  # noqa: F401  (sets the environment; before sglang and torch)

import lone_node
import torch
from exactness import BACKENDS, slim_model
from harness.environment import ON_GPU
from harness.scheduler import InprocScheduler


def timed(function, *args) -> tuple:
    """Seconds, and what it returns."""
    lone_node.synchronize()
    start = time.perf_counter()
    result = function(*args)
    lone_node.synchronize()
    return time.perf_counter() - start, result


def copies(model: Path, args) -> dict:
    """Seconds out and back of one request's rows, which must come back as they were."""
    out_s, back_s = [], []
    with lone_node.decode_node("ours", model, args, [1], 64, disable_cuda_graph=True) as engine:
        lone_node.randomize_index_keys(engine.kv_pool)
        engine.kv_pool.host_pool.kv_buffer.view(torch.uint8).random_(1, 100)
        rid = lone_node.submit(engine, lone_node.prompt_of(args.context), 64, 0)
        engine.step_until(lambda: len(engine.outputs[rid]) > 1)
        slots, pool = engine.slots(rid)[: args.context], engine.kv_pool
        pool.retraction.total *= 4  # copies are compared
        for _ in range(args.repeats):
            seconds, saved = timed(pool.get_cpu_copy, slots)
            out_s.append(seconds)
            for buffer in (pool.host_pool.kv_buffer, *pool.index_k_with_scale_buffer):
                buffer.view(torch.uint8).zero_()
            back_s.append(timed(pool.load_cpu_copy, saved, slots)[0])
            again = pool.get_cpu_copy(slots)
            for before, after in zip((saved.rows, *saved.index_keys), (again.rows, *again.index_keys)):
                assert torch.equal(before.view(torch.uint8), after.view(torch.uint8)), "rows have changed"
        num_bytes = saved.rows.nbytes + sum(layer.nbytes for layer in saved.index_keys)
        engine.abort(all_requests=True)
        engine.drain()
    return {"bytes": num_bytes, "out_s": statistics.median(out_s), "back_s": statistics.median(back_s)}


def prefill_s(model: Path, args) -> float:
    """From a prompt to its first token on a colocated server with the flag."""
    times = []
    with InprocScheduler(
        model,
        kv_cache_dtype=args.dtype,
        nsa_prefill_backend=BACKENDS[args.dtype],
        nsa_decode_backend=BACKENDS[args.dtype],
        page_size=lone_node.PAGE,
        disable_radix_cache=True,
        disable_cuda_graph=True,
        max_running_requests=2,
        chunked_prefill_size=8192,
        mem_fraction_static=0.6 if ON_GPU else 0.1,
        context_length=args.context + 128,
        grammar_backend="none",
        sampling_backend="pytorch",
        **lone_node.impl_args("ours", args, 2, 64),
    ) as engine:
        for seed in range(args.repeats + 1):
            prompt = [3 + (seed * 7919 + i * 31) % 1900 for i in range(args.context)]
            times.append(timed(engine.run, [prompt], 1)[0])
    return statistics.median(times[1:])


def measure(model: Path, args) -> dict:
    row = {"context": args.context, "layers": args.layers, "kv_dtype": args.dtype}
    row.update(copies(model, args), prefill_s=prefill_s(model, args))
    return {name: round(value, 4) if isinstance(value, float) else value for name, value in row.items()}


def main() -> None:
    parser = lone_node.parser_of(__doc__)
    parser.add_argument("--context", type=int, default=32768)
    parser.add_argument("--repeats", type=int, default=3)
    args = parser.parse_args()
    args.miss_rates = None
    row = measure(slim_model(args.model, args.layers), args)
    row = {"gpu": torch.cuda.get_device_name() if ON_GPU else "none", **row}
    args.out.write_text(json.dumps([row], indent=1) + "\n")
    print(json.dumps(row))


if __name__ == "__main__":
    main()
