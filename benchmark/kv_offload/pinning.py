"""How fast host memory is pinned, with one thread that touches the pages and with several.

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


def seconds(num_bytes: int, threads: int) -> float:
    """To map, touch and register so much, and nothing of it used before."""
    with mock.patch.object(host_memory, "_touch_threads", lambda: threads):
        start = time.perf_counter()
        buffer = host_memory.PinnedBuffer(num_bytes, True)
        taken = time.perf_counter() - start
    buffer.close()
    return taken


def measure(num_bytes: int, threads: list, repeats: int) -> list:
    """Rows in the order of ``threads``; their repeats are taken in turn."""
    times = {count: [] for count in threads}
    for _ in range(repeats):
        for count in threads:
            times[count].append(seconds(num_bytes, count))
    return [
        {
            "threads": count,
            "bytes": num_bytes,
            "s": round(statistics.median(taken), 3),
            "gb_s": round(num_bytes / statistics.median(taken) / 1e9, 2),
        }
        for count, taken in times.items()
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--gb", type=float, default=16.0)
    parser.add_argument("--threads", nargs="*", type=int, default=[1, 2, 4, 8])
    parser.add_argument("--repeats", type=int, default=3)
    args = parser.parse_args()
    torch.cuda.init()
    gpu = torch.cuda.get_device_name()
    rows = [{"gpu": gpu, **row} for row in measure(int(args.gb * 1e9) // 4096 * 4096, args.threads, args.repeats)]
    args.out.write_text(json.dumps(rows, indent=1) + "\n")
    print(json.dumps(rows, indent=1))


if __name__ == "__main__":
    main()
