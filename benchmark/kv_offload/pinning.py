"""How fast host memory is made, with one thread that touches the pages and with several.

    python benchmark/kv_offload/pinning.py --out benchmark/kv_offload/results/h200/pinning.json      # on a GPU
"""

import argparse
import json
import statistics
import time
from pathlib import Path
from unittest import mock

import torch
from sglang.srt.mem_cache.sparsity.nsa_offload import host_memory


def seconds(num_bytes: int, memory: str, threads: int) -> float:
    """To take so much of one kind, and nothing of it used before."""
    with mock.patch.object(host_memory, "_touch_threads", lambda: threads):
        start = time.perf_counter()
        buffer = host_memory.HostBuffer(num_bytes, memory)
        taken = time.perf_counter() - start
    buffer.close()
    return taken


def measure(num_bytes: int, kinds: list, threads: list, repeats: int) -> list:
    """Rows in the order of ``kinds`` and ``threads``; their repeats are taken in turn."""
    times = {(memory, count): [] for memory in kinds for count in threads}
    for _ in range(repeats):
        for memory, count in times:
            times[memory, count].append(seconds(num_bytes, memory, count))
    return [
        {
            "memory": memory,
            "threads": count,
            "bytes": num_bytes,
            "s": round(statistics.median(taken), 3),
            "gb_s": round(num_bytes / statistics.median(taken) / 1e9, 2),
        }
        for (memory, count), taken in times.items()
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--gb", type=float, default=16.0)
    parser.add_argument("--memory", nargs="*", default=["managed", "pinned"], choices=["managed", "pinned"])
    parser.add_argument("--threads", nargs="*", type=int, default=[1, 2, 4, 8])
    parser.add_argument("--repeats", type=int, default=3)
    args = parser.parse_args()
    torch.cuda.init()
    gpu = torch.cuda.get_device_name()
    rows = [{"gpu": gpu, **row} for row in measure(int(args.gb * 1e9) // 4096 * 4096, args.memory, args.threads, args.repeats)]
    args.out.write_text(json.dumps(rows, indent=1) + "\n")
    print(json.dumps(rows, indent=1))


if __name__ == "__main__":
    main()
