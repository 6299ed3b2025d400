"""Host pools by kind and size: how long they take to make, how fast fresh rows are read at either end, and whether all comes back.

    python benchmark/kv_offload/host_memory.py --out benchmark/kv_offload/results/h200/host_memory.json      # on a GPU

Each pool is made in a process of its own, which ends once by itself and once by SIGKILL. Managed memory is never larger than what
the GPU has free.
"""

import argparse
import json
import signal
import statistics
import subprocess
import sys
import time
from pathlib import Path

import psutil
import torch
from sglang.jit_kernel import nsa_kv_offload as kernels

ROW_BYTES, TOP_K, BATCH, WINDOW, RING, FIRST_SLOT = 656, 2048, 13, 4096, 64, 64
LAYER_ROWS = 4_194_304  # of one layer, 2.75 GB: beyond 2^31 bytes
LAYERS = 8  # in turn: one layer's address translations would stay in the GPU's caches
LAUNCHES = 24
SETTLED_BYTES = 1 << 30


def gather_us(layers: list, order_min_rows: int, device: str) -> float:
    """Median microseconds of a gather of 26,624 rows in chance order, none of them read before.

    Args:
        layers: each ``[n, 656]`` uint8, host rows of one layer; gathered from in turn.
        order_min_rows: as the pool's queue has it.
    """

    def filled(shape, value, dtype):
        return torch.full(shape, value, dtype=dtype, device=device)

    count = BATCH * TOP_K
    order = torch.randperm(len(layers[0]), device=device)[: LAUNCHES * count].int()
    queue = kernels.MissQueue(BATCH, TOP_K, len(layers[0]), device, order_min_rows)
    device_rows = filled((FIRST_SLOT + BATCH * (WINDOW + RING), ROW_BYTES), 0, torch.uint8)
    topk = torch.arange(TOP_K, dtype=torch.int32, device=device).repeat(BATCH, 1)
    windows = torch.arange(BATCH, dtype=torch.int32, device=device)
    lengths, counters = filled((BATCH,), TOP_K, torch.int32), filled((3,), 0, torch.int64)
    times = []
    for launch, host_slots in enumerate(order.view(LAUNCHES, BATCH, TOP_K)):
        rows = layers[launch % len(layers)]
        held, used = filled((BATCH, WINDOW), -1, torch.int32), filled((BATCH, WINDOW), 0, torch.int16)
        page_table = kernels.swap_topk(
            topk, windows, windows, lengths, lengths, host_slots.contiguous(), held, used, counters, queue, TOP_K, RING, FIRST_SLOT, WINDOW + RING
        )
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2)) if device == "cuda" else (None, None)
        if start:
            start.record()
        kernels.gather_misses(rows, device_rows, queue)
        if end:
            end.record()
            end.synchronize()
            times.append(start.elapsed_time(end) * 1e3)
        first = int(host_slots[0, 0])
        assert torch.equal(device_rows[int(page_table[0, 0])].cpu(), rows[first]), "a wrong row"
    assert int(counters[2]) == LAUNCHES * count, "not all missed"
    return round(statistics.median(times), 1) if times else 0.0


def child(memory: str, num_bytes: int, device: str, layer_rows: int) -> dict:
    """Make a pool and read both ends of it."""
    from sglang.srt.mem_cache.sparsity.nsa_offload.host_limits import free_huge_bytes
    from sglang.srt.mem_cache.sparsity.nsa_offload.host_memory import HostBuffer

    if device == "cuda":
        torch.cuda.init()
        if memory == "managed" and num_bytes > torch.cuda.mem_get_info()[0]:
            raise SystemExit("never more managed memory than the GPU has free")
    kernels.compile_kernels(TOP_K, ROW_BYTES)
    huge = free_huge_bytes()
    start = time.perf_counter()
    buffer = HostBuffer(num_bytes, memory)
    taken = time.perf_counter() - start
    least = kernels.ORDER_MIN_ROWS_MANAGED if memory == "managed" else kernels.ORDER_MIN_ROWS
    layers = list(buffer.tensor.view(-1, ROW_BYTES).split(layer_rows))[: num_bytes // ROW_BYTES // layer_rows]
    for name, rows in enumerate(layers):
        rows[:, 0] = name
    near, far = (gather_us(part, least, device) for part in (layers[:LAYERS], layers[-LAYERS:]))
    return {"take_s": round(taken, 2), "gather_near_us": near, "gather_far_us": far, "free_huge_gb": huge and round(huge / 1e9, 1)}


def available() -> int:
    return psutil.virtual_memory().available


def lives(memory: str, gigabytes: float, killed: bool) -> dict:
    """One process from its start until its memory is back."""
    before = available()
    command = [sys.executable, __file__, "--child", memory, str(gigabytes), "wait" if killed else "end"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        line = next((line for line in process.stdout if line.startswith("{")), None)
        if killed:
            process.send_signal(signal.SIGKILL)
        ended = time.perf_counter()
        code = process.wait()
        exit_s = time.perf_counter() - ended
        while available() < before - SETTLED_BYTES and time.perf_counter() < ended + 60:
            time.sleep(0.05)
    row = json.loads(line) if line else {}
    return {
        "memory": memory,
        "gb": gigabytes,
        "end": "SIGKILL" if killed else "exit",
        "exit_code": code,
        **row,
        "exit_s": round(exit_s, 2),
        "memory_back_s": round(time.perf_counter() - ended, 2),
        "memory_back": available() >= before - SETTLED_BYTES,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path)
    parser.add_argument("--managed-gb", nargs="*", type=float, default=[28, 64, 96])
    parser.add_argument("--pinned-gb", nargs="*", type=float, default=[28, 64])
    parser.add_argument("--append", action="store_true", help="keep the rows that the file has")
    parser.add_argument("--child", nargs=3, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.child:
        memory, gigabytes, then = args.child
        row = child(memory, int(float(gigabytes) * 1e9) // ROW_BYTES * ROW_BYTES, "cuda", LAYER_ROWS)
        print(json.dumps({"gpu": torch.cuda.get_device_name(), **row}), flush=True)
        time.sleep(60 * (then == "wait"))
        return
    rows = json.loads(args.out.read_text()) if args.append else []
    for memory, sizes in (("pinned", args.pinned_gb), ("managed", args.managed_gb)):
        for gigabytes in sizes:
            for killed in (False, True):
                rows.append(lives(memory, gigabytes, killed))
                print(json.dumps(rows[-1]), flush=True)
                args.out.write_text(json.dumps(rows, indent=1) + "\n")


if __name__ == "__main__":
    main()
