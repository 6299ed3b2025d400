"""Decode steps with the flag off: SGLang with the series applied, beside the SGLang that it was applied to.

    HARNESS_DEVICE=cuda PYTHONPATH=test python benchmark/kv_offload/flag_off.py \
        --trees stock=/path/with/sglang patched=/path/with/patched/sglang --out benchmark/kv_offload/results/h200/flag_off.json

Each tree has some processes, each with a dense server of the slim model; rounds are timed in turn, so that all see the same
machine. Servers of one tree may differ too, so a tree's time is the median of its servers'. The second tree must take 0.99 to 1.01
times as long as the first.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
from pathlib import Path

LIMITS = (0.99, 1.01)
FIRST_PORT = 23400  # below those that the kernel gives out


def child(args) -> None:
    """Serve; time one round for each line of the input."""
    import lone_node
    from exactness import slim_model

    args.batches, args.miss_rates = [args.batch], None
    new_tokens = (args.warmup + args.steps) * (args.rounds + 1) + 100
    args.rounds = 1  # a line
    model, port = slim_model(args.model, args.layers), {"nccl_port": args.port}
    with lone_node.decode_node("dense", model, args, args.batches, new_tokens, **port) as engine:
        lone_node.randomize_index_keys(engine.kv_pool)
        lone_node.run_batch(engine, lone_node.prompt_of(args.context), new_tokens, range(args.batch))
        print("answer", json.dumps(_tree()), flush=True)
        for _ in sys.stdin:
            (time_ms,), _ = lone_node.time_steps(engine, args)
            print("answer", json.dumps(time_ms), flush=True)
        engine.abort(all_requests=True)
        engine.drain()


def _tree() -> str:
    import sglang

    return str(Path(sglang.__file__).resolve().parents[1])


class TreeServer:
    """A server on one of the trees."""

    def __init__(self, path: str, index: int) -> None:
        path = str(Path(path).resolve())
        env = {**os.environ, "STOCK_SGLANG": "1", "PYTHONPATH": os.pathsep.join([path, os.environ.get("PYTHONPATH", "")])}
        # Free ports that SGLang picks while others start may be taken before it listens there.
        command = [sys.executable, __file__, "--child", "--port", str(FIRST_PORT + index), *sys.argv[1:]]
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=env)
        self._path = path

    def wait(self) -> None:
        served = self._answer()
        if served != self._path:
            raise RuntimeError(f"the server of {self._path} runs {served}")

    def round_ms(self) -> float:
        print(file=self._process.stdin, flush=True)
        return self._answer()

    def close(self) -> None:
        self._process.stdin.close()
        if self._process.wait() != 0:  # it checks for leaks as it ends
            raise RuntimeError(f"the server of {self._path} ended with {self._process.returncode}")

    def _answer(self):
        for line in self._process.stdout:
            if line.startswith("answer "):
                return json.loads(line.split(" ", 1)[1])
        raise RuntimeError(f"the server of {self._path} ended with {self._process.wait()}")


def compare(trees: dict, args) -> dict:
    """Times of all rounds by tree and server, and the second tree's time as a multiple of the first's."""
    names = list(trees) * args.servers
    servers = [(name, TreeServer(trees[name], index)) for index, name in enumerate(names)]
    for _, server in servers:
        server.wait()
    rounds = [[] for _ in servers]
    for turn in range(args.rounds):
        order = range(len(servers)) if turn % 2 == 0 else range(len(servers))[::-1]
        for index in order:
            rounds[index].append(round(servers[index][1].round_ms(), 4))
    for _, server in servers:
        server.close()
    times = {name: [of_server for owner, of_server in zip(names, rounds) if owner == name] for name in trees}
    medians = {name: [statistics.median(server) for server in of_tree] for name, of_tree in times.items()}
    first, second = (statistics.median(of_tree) for of_tree in medians.values())
    row = {"batch": args.batch, "context": args.context, "layers": args.layers, "kv_dtype": args.dtype, "steps_a_round": args.steps}
    return {**row, "step_ms": times, "server_medians_ms": medians, "ratio": round(second / first, 4)}


def main() -> None:
    import lone_node  # the harness before sglang and torch

    parser = lone_node.parser_of(__doc__)
    parser.set_defaults(warmup=3, steps=60)
    parser.add_argument("--trees", nargs=2, metavar="NAME=PATH", required=True)
    parser.add_argument("--batch", type=int, default=64)
    parser.add_argument("--context", type=int, default=8192)
    parser.add_argument("--servers", type=int, default=3, help="of each tree")
    parser.add_argument("--child", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--port", type=int, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.child:
        child(args)
        return
    import torch

    row = compare(dict(tree.split("=", 1) for tree in args.trees), args)
    row = {"gpu": torch.cuda.get_device_name() if torch.cuda.is_available() else "none", **row}
    args.out.write_text(json.dumps(row, indent=1) + "\n")
    print(json.dumps(row))
    if not LIMITS[0] <= row["ratio"] <= LIMITS[1]:
        raise SystemExit(f"the ratio is not within {LIMITS}")


if __name__ == "__main__":
    main()
