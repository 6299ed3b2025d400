"""Rows on their way to the host: what a decode step's write-back and a prompt's rows cost, beside one large copy.

    python benchmark/kv_offload/write_back.py --out benchmark/kv_offload/results/h200/write_back.json      # on a Hopper GPU, ~30 seconds

Each launch writes rows of its own. Times are medians of the copy stream's, the host's launches hidden behind a spin kernel; the
field launch_us is what the scheduler's thread spends on it.

Rows: what is one of
  step      the new rows of a batch in all layers (SparseCacheController.write_back); host slots all over the pool, device slots at random
  prompt    a prompt's rows, layer by layer (store_layer); host slots in shuffled pages of 64, device slots at random
memory is the host pool's kind, and impl is ours, per_layer (the stock per-layer kernel, as HiSparse backs up), or copy (one copy of as many bytes,
to pinned memory: managed memory is copied in pieces).
"""

import argparse
import json
import statistics
import time
from pathlib import Path
from types import SimpleNamespace

import torch
from sgl_kernel.kvcacheio import transfer_kv_per_layer_mla
from sglang.srt.mem_cache.sparsity.nsa_offload.controller import SparseCacheController
from sglang.srt.mem_cache.sparsity.nsa_offload.host_memory import HostBuffer

LAYERS, PAGE, TIMED, SPIN_CYCLES = 61, 64, 9, 20_000_000


class Pools:
    """Device and host rows of all layers, behind the real controller."""

    def __init__(self, memory: torch.Tensor, row_bytes: int, device_rows: int) -> None:
        host_rows = len(memory) // (LAYERS * row_bytes) // PAGE * PAGE
        self.row_bytes, self.host_rows, self.device_rows = row_bytes, host_rows, device_rows
        self.host = memory[: LAYERS * host_rows * row_bytes].view(LAYERS, host_rows, row_bytes)
        self.device = [
            torch.randint(0, 256, (device_rows, row_bytes), dtype=torch.uint8, device="cuda") for _ in range(LAYERS)
        ]

        def addresses(layers) -> torch.Tensor:
            return torch.tensor([layer.data_ptr() for layer in layers], dtype=torch.uint64, device="cuda")

        self.controller = SparseCacheController(
            SimpleNamespace(kv_buffer=self.device, data_ptrs=addresses(self.device), device="cuda", layer_num=LAYERS),
            SimpleNamespace(kv_buffer=self.host, layer_ptrs=addresses(self.host), row_bytes=row_bytes),
        )

    def slots(self, rows: int, pages: bool, generator) -> tuple:
        """Device and host slots of a launch; the padding page is left out."""
        host = torch.randperm(self.host_rows - PAGE, generator=generator)[:rows] + PAGE
        if pages:
            chosen = torch.randperm(self.host_rows // PAGE - 1, generator=generator)[: -(-rows // PAGE)] + 1
            host = (chosen[:, None] * PAGE + torch.arange(PAGE)).flatten()[:rows]
        device = torch.randperm(self.device_rows, generator=generator)[:rows]
        return device.cuda(), host.cuda()

    def check(self, device_slots: torch.Tensor, host_slots: torch.Tensor) -> None:
        for layer in (0, LAYERS - 1):
            assert torch.equal(self.device[layer][device_slots].cpu(), self.host[layer][host_slots.cpu()])


def runs(pools: Pools, what: str, device_slots: torch.Tensor, host_slots: torch.Tensor) -> dict:
    """impl -> a function that copies these rows of all layers on the current stream or behind it."""
    controller, count = pools.controller, len(host_slots)

    def ours() -> None:
        if what == "step":
            controller.write_back(device_slots, host_slots)
        else:
            for layer in range(LAYERS):
                controller.store_layer(layer, device_slots, host_slots)

    def per_layer() -> None:
        for layer in range(LAYERS):
            transfer_kv_per_layer_mla(pools.device[layer], pools.host[layer], device_slots, host_slots, pools.row_bytes)

    def copy() -> None:
        num_bytes, flat = count * LAYERS * pools.row_bytes, pools.host.view(-1)
        flat[begin : begin + num_bytes].copy_(source[:num_bytes], non_blocking=True)

    # Looked up here: to ask the device for it while timed would wait for the spin kernel.
    begin = int(host_slots[0]) % (pools.host.numel() - count * LAYERS * pools.row_bytes)
    source = torch.empty((count * LAYERS * pools.row_bytes,), dtype=torch.uint8, device="cuda")
    return {"ours": ours, "per_layer": per_layer, "copy": copy}


def measure(pools: Pools, what: str, rows: int, impls: list) -> list:
    result, generator = [], torch.Generator().manual_seed(rows)
    for impl in impls:
        times, launches = [], []
        for _ in range(TIMED + 2):
            slots = pools.slots(rows, what == "prompt", generator)
            run = runs(pools, what, *slots)[impl]
            torch.cuda.synchronize()
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            torch.cuda._sleep(SPIN_CYCLES)
            begin.record()
            start = time.perf_counter()
            run()
            launches.append((time.perf_counter() - start) * 1e6)
            pools.controller.forward_begin()  # the current stream waits for the copy stream
            end.record()
            end.synchronize()
            times.append(begin.elapsed_time(end) * 1e3)
            if impl == "ours":
                pools.check(*slots)
        us, num_bytes = statistics.median(times[2:]), rows * LAYERS * pools.row_bytes
        result.append(
            {
                "what": what,
                "impl": impl,
                "gpu": torch.cuda.get_device_name(),
                "rows": rows,
                "layers": LAYERS,
                "row_bytes": pools.row_bytes,
                "us": round(us, 1),
                "gb_s": round(num_bytes / us / 1e3, 2),
                "launch_us": round(statistics.median(launches[2:]), 1),
            }
        )
        print(json.dumps(result[-1]), flush=True)
    return result


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--host-gb", type=float, default=8.0)
    parser.add_argument("--memory", nargs="*", default=["managed", "pinned"], choices=["managed", "pinned"])
    args = parser.parse_args()
    num_bytes = int(args.host_gb * 1e9) // 4096 * 4096
    result = []
    for kind in args.memory:
        memory = HostBuffer(num_bytes, kind, chunk_bytes=num_bytes)  # a copy may not span registrations
        impls = ["ours", "per_layer"] + ["copy"] * (kind == "pinned")
        for row_bytes in (656, 1152):
            pools = Pools(memory.tensor, row_bytes, 1 << 16)
            for what, rows in (("step", 16), ("step", 128), ("prompt", 32768)):
                result += [{"memory": kind, **row} for row in measure(pools, what, rows, impls)]
                args.out.write_text(json.dumps(result, indent=1) + "\n")
            del pools
        memory.close()


if __name__ == "__main__":
    main()
