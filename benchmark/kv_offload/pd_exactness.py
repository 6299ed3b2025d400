"""Tokens of prefill-decode pairs with offloading against those of a colocated server without it, on the CPU reference.

    PYTHONPATH=test python benchmark/kv_offload/pd_exactness.py --out benchmark/kv_offload/results/cpu/pd_exactness.json

Real servers over real transfer backends on loopback. In each case the same requests, up to 16 at a time: prompts of 1 token to
many windows, half of them behind shared prefixes, answers of 1 to 24 tokens. Where the nodes wrote to is taken from their own
calls (`pd_recorder`): on one machine all memory is alike.
"""

import argparse
import json
import random
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Dict, List, NamedTuple, Sequence, Tuple

import harness  # noqa: F401  (sets the environment; before sglang)
from harness import environment, offload, pd, pd_recorder
from harness.server import Server

MAX_NEW_TOKENS = 24
MAX_TAIL = 7 * offload.WINDOW
EDGES = (1, 2, 63, 64, 65, 127, 128, 129, 191, 193, MAX_TAIL)  # pages of 64, a window of 128
PREFIXES = (64, 130, 250)
PLAIN_PREFILL = ("--disable-radix-cache",)
# A device pool that holds less than the prompts do: their rows move to its host pool and come back.
HIERARCHICAL = ("--enable-hierarchical-cache", "--hicache-ratio", "4", "--max-total-tokens", "4096")
RADIX = ("--disaggregation-decode-enable-radix-cache",)


class Case(NamedTuple):
    """One pair of nodes."""

    backend: str = "mooncake"
    dtype: str = "bfloat16"
    prefill: Tuple[str, ...] = PLAIN_PREFILL
    decode: Tuple[str, ...] = ()
    stock_prefill: bool = True
    router: bool = False


CASES = {
    "mooncake": Case(),
    "mooncake-hicache-radix-router": Case(prefill=HIERARCHICAL, decode=RADIX, router=True),
    "nixl": Case("nixl", stock_prefill=False),
    "mooncake-radix": Case(dtype="fp8_e4m3", decode=RADIX),
    "nixl-radix": Case("nixl", dtype="fp8_e4m3", decode=RADIX, stock_prefill=False),
}


class Request(NamedTuple):
    ids: List[int]
    new_tokens: int


def make_requests(count: int, seed: int) -> List[Request]:
    """The edge lengths, then lengths up to `MAX_TAIL` with many short ones, every other one behind a shared prefix."""
    rng = random.Random(seed)
    prefixes = offload.prompts(PREFIXES, seed + 1)
    lengths = [*EDGES, *(round(MAX_TAIL ** rng.random()) for _ in range(count))][:count]
    tails = offload.prompts(lengths, seed)
    plain = len(EDGES)
    ids = [tail if i < plain or i % 2 else rng.choice(prefixes) + tail for i, tail in enumerate(tails)]
    return [Request(prompt, rng.randint(1, MAX_NEW_TOKENS)) for prompt in ids]


def ask(server, requests: Sequence[Request], at_once: int) -> List[Dict]:
    """Answers of a server, a pair or a router, in the requests' order."""
    with ThreadPoolExecutor(at_once) as pool:
        return list(pool.map(lambda request: server.generate(request.ids, request.new_tokens), requests))


def colocated(model: str, dtype: str, requests: Sequence[Request], at_once: int, logs: Path) -> List[List[int]]:
    """Tokens of one server without the flag and without a prefix cache."""
    with Server(model, logs / f"colocated-{dtype}.log", (*offload.command_line(dtype), "--disable-radix-cache")) as server:
        return [answer["output_ids"] for answer in ask(server, requests, at_once)]


def transfers(record: Path) -> Dict[str, int]:
    """Counts of what the prefill node sent; AssertionError where rows went anywhere but to their kind of memory."""
    (places,) = pd_recorder.read(record, "places")
    sent = pd_recorder.read(record, "sent")
    for transfer in sent:
        kind = "host" if transfer["latent"] else "index_keys"
        assert transfer["pointers"] == [first for first, _ in places[kind]], transfer
    latent = [t for t in sent if t["latent"]]
    return {
        "latent_transfers_to_host_memory": len(latent),
        "between_pages_without_a_common_number": sum(not set(t["prefill_pages"]) & set(t["decode_pages"]) for t in latent),
        "index_key_transfers_to_the_device": len(sent) - len(latent),
    }


def run(case: Case, model: str, requests: Sequence[Request], expected, at_once: int, logs: Path) -> Dict:
    logs.mkdir()
    record = logs / "record"
    with pd.Pair(
        model,
        logs,
        case.backend,
        args=[*offload.command_line(case.dtype), "--sleep-on-idle"],
        prefill_args=["--chunked-prefill-size", "512", *case.prefill],
        decode_args=[*offload.offload_command_line(), *case.decode],
        stock_prefill=case.stock_prefill,
        env=pd_recorder.install(record),
    ) as pair:
        front = pd.Router(pair, logs / "router.log") if case.router else pair
        try:
            begin = time.monotonic()
            answers = ask(front, requests, at_once)
            seconds = time.monotonic() - begin
        finally:
            if case.router:
                front.stop()
        stock = "enable_decode_nsa_kv_offload" not in json.loads(pair.prefill.get("/server_info"))
        time.sleep(1)  # idle rounds, with their leak checks
        healthy = pair.prefill.healthy() and pair.decode.healthy()
        pair.decode.flush()
    metas = [answer["meta_info"] for answer in answers]
    wrong = [i for i, (answer, tokens) in enumerate(zip(answers, expected)) if answer["output_ids"] != tokens]
    return {
        "case": case._asdict(),
        "prefill_node_is_stock": stock,
        "requests": len(requests),
        "equal": len(requests) - len(wrong),
        "wrong": wrong,
        "tokens_compared": sum(len(tokens) for tokens in expected),
        "cached_tokens": sum(meta["cached_tokens"] for meta in metas),
        "cached_tokens_from_host": sum((meta.get("cached_tokens_details") or {}).get("host", 0) for meta in metas),
        **transfers(record),
        "healthy_and_flushed_after": healthy,
        "seconds": round(seconds, 1),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--requests", type=int, default=200)
    parser.add_argument("--at-once", type=int, default=16)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--cases", nargs="*", choices=CASES, default=list(CASES))
    parser.add_argument("--out", type=Path, default=Path("pd_exactness.json"))
    args = parser.parse_args()

    from tiny_model import TinySpec, write_checkpoint

    model = environment.MODELS / "tiny"
    write_checkpoint(model, TinySpec())
    logs = Path(tempfile.mkdtemp(prefix="pd-exactness-"))
    requests = make_requests(args.requests, args.seed)
    lengths = sorted(len(request.ids) for request in requests)
    expected: Dict[str, List[List[int]]] = {}
    result = {
        "window": offload.WINDOW,
        "at_once": args.at_once,
        "seed": args.seed,
        "prompt_tokens": {"min": lengths[0], "median": lengths[len(lengths) // 2], "max": lengths[-1], "sum": sum(lengths)},
        "prompts_longer_than_the_window": sum(n > offload.WINDOW for n in lengths),
        "cases": {},
    }
    if args.out.exists():  # of the same requests: cases can be run one by one
        earlier = json.loads(args.out.read_text())
        if {**earlier, "cases": {}} == result:
            result["cases"] = earlier["cases"]
    for name in args.cases:
        case = CASES[name]
        if case.dtype not in expected:
            expected[case.dtype] = colocated(str(model), case.dtype, requests, args.at_once, logs)
        found = run(case, str(model), requests, expected[case.dtype], args.at_once, logs / name)
        result["cases"][name] = found
        print(f"{name}: {found['equal']} of {found['requests']} equal, {found['seconds']} s", flush=True)
        args.out.parent.mkdir(parents=True, exist_ok=True)
        args.out.write_text(json.dumps(result, indent=1) + "\n")
    failed = [name for name, case in result["cases"].items() if case["wrong"] or not case["healthy_and_flushed_after"]]
    if failed:
        raise SystemExit(f"failed: {', '.join(failed)}; logs in {logs}")


if __name__ == "__main__":
    main()
