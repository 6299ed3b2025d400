"""How many requests fit into the same device bytes, and what they make: dense, HiSparse and offloading in one run on one GPU.

    HARNESS_DEVICE=cuda PYTHONPATH=test python benchmark/kv_offload/capacity.py --out benchmark/kv_offload/results/h200/capacity.json

The budget counts everything that holds KV or finds it, as allocated: pools, index keys, tables, staging. An implementation's bytes
are linear in its requests, so two small servers tell how many fit; the server that is then measured must be within the budget.
Each implementation is measured at the batches that fit the ones before it too, so that steps of equal batches can be compared.
The top-k is replayed (`replayed_topk.py`); without copies dense has no misses, so one miss rate is enough for it.
"""

import copy
import json
import multiprocessing
from concurrent.futures import ProcessPoolExecutor, ThreadPoolExecutor
from pathlib import Path
from typing import Callable, Iterator, List

import decode_step
import lone_node
from exactness import slim_model

IMPLS = ("dense", "hisparse", "ours")
PROBES = (2, 6)


def held_bytes(impl: str, args, model: Path, new_tokens: int, requests: int) -> int:
    """Of a server with room for so many requests."""
    with lone_node.decode_node(impl, model, args, [requests], new_tokens, disable_cuda_graph=True) as engine:
        return lone_node.pool_bytes(engine)


def rows_of(impl: str, args, model: Path, new_tokens: int, batches: List[int]) -> List[dict]:
    """`decode_step.measure` at these batches."""
    args.batches = batches
    args.miss_rates = args.miss_rates[:1] if impl == "dense" else args.miss_rates
    return list(decode_step.measure(impl, model, args, new_tokens))


def in_processes(function: Callable, calls: List[tuple]) -> list:
    """Call at once with each of the arguments, each in a process of its own: HiSparse leaves host memory registered, which the
    next server of its process then cannot pin."""

    def call(args: tuple):
        with ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn")) as pool:
            return pool.submit(function, *args).result()

    with ThreadPoolExecutor(len(calls)) as threads:
        return list(threads.map(call, calls))


def measure(model: Path, args, call_all: Callable = in_processes) -> Iterator[dict]:
    """Rows of one context.

    Args:
        call_all: a function and the arguments of each of its calls, to their results.

    Raises:
        ValueError: not one request fits.
        RuntimeError: a server took more than the budget.
    """
    new_tokens = decode_step.tokens_made(len(args.impls), args)
    own = {impl: (impl, copy.copy(args), model, new_tokens) for impl in args.impls}
    held = call_all(held_bytes, [(*own[impl], count) for impl in args.impls for count in PROBES])
    batches: List[int] = []
    for impl, low, high in zip(args.impls, held[::2], held[1::2]):
        each = (high - low) / (PROBES[1] - PROBES[0])
        fit = int((args.budget_gb * 1e9 - low) // each) + PROBES[0]
        if fit < 1:
            raise ValueError(f"{impl}: a request of {args.context} tokens takes {each / 1e9:.2f} GB, over the budget")
        batches = sorted({*(batch for batch in batches if batch < fit), fit})
        for row in call_all(rows_of, [(*own[impl], batches)])[0]:
            if row["pool_gb"] > args.budget_gb:
                raise RuntimeError(f"{impl}: {fit} requests take {row['pool_gb']} GB, over the budget")
            yield {"budget_gb": args.budget_gb, "requests_that_fit": fit, "request_gb": round(each / 1e9, 4), **row}


def main() -> None:
    parser = lone_node.parser_of(__doc__)
    parser.set_defaults(miss_rates=[0.02, 0.134], warmup=20, rounds=3)
    parser.add_argument("--impls", nargs="*", default=IMPLS, choices=IMPLS)
    parser.add_argument("--budget-gb", type=float, default=13.0)
    parser.add_argument("--contexts", nargs="*", type=int, default=[32768, 131072])
    args = parser.parse_args()
    model, rows = slim_model(args.model, args.layers), []
    for context in args.contexts:
        args.context = context
        for row in measure(model, args):
            rows.append(row)
            print(json.dumps(row), flush=True)
            args.out.write_text(json.dumps(rows, indent=1) + "\n")


if __name__ == "__main__":
    main()
