"""What one layer's swap costs: the CUDA kernels, HiSparse's, a stock copy of the same rows, and the link's limit, in one run.

    python benchmark/kv_offload/swap_layer.py --out benchmark/kv_offload/results/h200/swap_layer.json      # on a Hopper GPU, ~3 minutes

Steady state and first touch: each step keeps (1 - miss rate) of the last top-k and takes positions that were never resident
for the rest; layers take turns, each with its own pool, tables and windows; up to 22 GB of pool in up to 256 layers; each
implementation has lists of its own, and the CPU's cache is overwritten before it. All is measured on both kinds of host memory: a
server takes managed memory, and pinned memory where a transfer engine registers it; HiSparse takes pinned memory. Cases with
several queries are a verify step's
swap (multi-token prediction); the case after each has one list with as many misses. A spin kernel before each timed launch hides
the host's launch time. Times are medians over layers and steps.

Rows: memory is managed or pinned, and impl is one of
  ours          swap_topk and gather_misses, as a server chooses its order by the number of misses
  ours_listed   the same, rows always in the order of their misses
  ours_ordered  the same, rows always in host-address order
  no_io         the same two launches where nothing misses
  hisparse      load_cache_to_device_buffer_mla, block 1024
  ours_cold, hisparse_cold   of cases without misses: the L2 cache is overwritten before each launch, and the top-k read into it again
  transfer_kv   sgl-kernel's transfer_kv_per_layer_mla, the missing rows alone
  gather        gather_misses alone, the rows in the order of their misses
  gather_sorted gather_misses alone, the list sorted by host slot: the limit of scattered rows
  copy          one copy of as many bytes, the limit of the link; of pinned memory, since managed memory is copied in pieces
"""

import argparse
import gc
import json
import statistics
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Callable, Dict, Iterator, List

import torch
from sglang.jit_kernel import nsa_kv_offload as kernels
from tqdm import tqdm

WINDOW, TOP_K, RING, PAGE = 4096, 2048, 64, 64
FIRST_WINDOW_SLOT = 64
WARMUP, TIMED = 4, 6
SPIN_CYCLES = 400_000
NEVER = 1 << 30
CACHE_BYTES = 256 << 20  # more than any L2 cache has


@dataclass(frozen=True)
class Case:
    batch: int
    row_bytes: int
    miss_rate: float
    positions: int = 32768
    placement: str = "pages"
    pool_rows: int = 0
    """Host rows of a layer; 0 for as many as the batch has. A server's pool is larger than a small batch."""
    queries: int = 1
    """Query tokens of a request in one step; from one list to the next ``miss_rate`` of the rows are new."""
    window: int = field(default_factory=lambda: WINDOW)

    @property
    def new(self) -> int:
        """Rows of a list that the one before has not."""
        return round(TOP_K * self.miss_rate)

    @property
    def misses(self) -> int:
        """Of a step, all requests."""
        return self.batch * self.queries * self.new

    @property
    def impls(self) -> tuple:
        """What can be compared: the peer has few windows, and nothing else takes several lists."""
        if self.queries > 1:
            return ("ours",)
        return ("ours", "gather_sorted") if self.window != WINDOW else tuple(IMPLS)


def several_lists(batch: int, queries: int) -> tuple:
    """A verify step's swap, its lists sharing 90% with the next, and one list with as many misses."""
    window = queries * TOP_K
    return (
        Case(batch, 656, 0.1, queries=queries, window=window),
        Case(batch, 656, 0.1 * queries, window=window),
    )


CASES = (
    *(Case(batch, 656, 0.0) for batch in (1, 16, 128)),
    Case(1, 656, 0.1),
    Case(1, 656, 0.1, pool_rows=1 << 22),
    *(Case(16, 656, rate) for rate in (0.02, 0.1)),
    Case(16, 656, 0.1, pool_rows=1 << 22),
    Case(64, 656, 0.02),  # the shape of decode_step.py
    *(Case(128, 656, 0.1, placement=p) for p in ("contiguous", "pages", "random")),
    Case(128, 656, 0.02),
    *(Case(128, 1152, rate, positions=16384) for rate in (0.02, 0.1)),
    *(Case(16, 656, rate, positions=131072) for rate in (0.0, 0.1)),  # some positions share a place in the swap's table
    *(case for batch in (16, 128) for queries in (2, 4) for case in several_lists(batch, queries)),
)


class HostMemory:
    """One buffer for every case: to take memory takes longer than to measure."""

    def __init__(self, kind: str, tensor: torch.Tensor, owner=None) -> None:
        self.kind, self.tensor, self._owner, self._filled = kind, tensor, owner, None

    def layers(self, count: int, rows: int, row_bytes: int) -> torch.Tensor:
        """``[count, rows, row_bytes]``; both ends of a row tell layer and slot: filling all bytes would take too long."""
        host = self.tensor[: count * rows * row_bytes].view(count, rows, row_bytes)
        if self._filled != (count, rows, row_bytes):
            words = host.view(torch.int64)
            for layer in range(count):
                words[layer, :, 0] = words[layer, :, -1] = torch.arange(rows) + layer * rows
            self._filled = (count, rows, row_bytes)
        return host


class Pool:
    """Host rows of several layers, and where each request's positions lie in them.

    Args:
        memory: of the host.
        max_layers: at most as many, and as fit into the memory.
    """

    def __init__(self, case: Case, memory: HostMemory, max_layers: int, device: str, seed: int = 0) -> None:
        generator = torch.Generator().manual_seed(seed)
        rows = case.pool_rows or case.batch * case.positions
        self.layers = min(max_layers, len(memory.tensor) // (rows * case.row_bytes))
        if self.layers < 1:
            raise ValueError(f"{case}: a layer takes {rows * case.row_bytes / 1e9:.1f} GB of host memory")
        self.host = memory.layers(self.layers, rows, case.row_bytes)
        order = torch.arange(rows)
        if case.placement == "pages":
            pages = torch.randperm(rows // PAGE, generator=generator)
            order = (pages[:, None] * PAGE + torch.arange(PAGE)).flatten()
        elif case.placement == "random":
            order = torch.randperm(rows, generator=generator)
        order = order[: case.batch * case.positions]
        self.req_to_token = order.view(case.batch, case.positions).int().to(device)
        slots = FIRST_WINDOW_SLOT + case.batch * (case.window + RING)
        self.device = torch.zeros((self.layers, slots, case.row_bytes), dtype=torch.uint8, device=device)


def topk_lists(case: Case, steps: int, seed: int = 0) -> torch.Tensor:
    """``[steps, batch, queries * TOP_K]`` int32; the first list's rows are all new."""
    generator = torch.Generator().manual_seed(seed)
    # The newest positions are left out: they would be ring hits.
    fresh = [torch.randperm(case.positions - RING - 1, generator=generator) for _ in range(case.batch)]
    count = steps * case.queries
    if TOP_K + (count - 1) * case.new > len(fresh[0]):
        raise ValueError(f"{case}: {steps} steps need more positions")
    rows = torch.stack([order[:TOP_K] for order in fresh])
    lists = [rows]
    for index in range(1, count):
        rows = rows.clone()
        for b, order in enumerate(fresh):
            places = torch.randperm(TOP_K, generator=generator)[: case.new]
            begin = TOP_K + (index - 1) * case.new
            rows[b, places] = order[begin : begin + case.new]
        lists.append(rows)
    return torch.stack(lists).view(steps, case.queries, case.batch, TOP_K).transpose(1, 2).flatten(2).int()


class Ours:
    """The two launches of a layer, on tables of their own."""

    def __init__(self, case: Case, pool: Pool, steps: int, order_min_rows: int = kernels.ORDER_MIN_ROWS) -> None:
        device, batch, layers = pool.device.device, case.batch, pool.layers
        self.case, self.pool = case, pool

        def filled(shape, value, dtype):
            return torch.full(shape, value, dtype=dtype, device=device)

        self.position_at_offset = filled((layers, batch, case.window), -1, torch.int32)
        self.last_used = filled((layers, batch, case.window), 0, torch.int16)
        self.counters = filled((layers, 3), 0, torch.int64)
        self.windows = torch.arange(batch, dtype=torch.int32, device=device)
        self.ring_begin = filled((batch,), case.positions, torch.int32)
        self.lengths = [filled((batch,), case.positions + step, torch.int32) for step in range(steps)]
        self.queue = kernels.MissQueue(batch, case.queries * TOP_K, pool.host.shape[1], device, order_min_rows)

    def __call__(self, layer: int, step: int, topk: torch.Tensor) -> torch.Tensor:
        page_table = kernels.swap_topk(
            topk,
            self.windows,
            self.windows,
            self.lengths[step],
            self.ring_begin,
            self.pool.req_to_token,
            self.position_at_offset[layer],
            self.last_used[layer],
            self.counters[layer],
            self.queue,
            TOP_K,
            RING,
            FIRST_WINDOW_SLOT,
            self.case.window + RING,
        )
        kernels.gather_misses(self.pool.host[layer], self.pool.device[layer], self.queue)
        return page_table


class HiSparse:
    """The peer in the pinned tree, on tables of its own."""

    def __init__(self, case: Case, pool: Pool, steps: int) -> None:
        device, batch, layers = pool.device.device, case.batch, pool.layers
        self.case, self.pool = case, pool
        slots = torch.arange(batch * (WINDOW + 1), dtype=torch.int32, device=device)
        self.locs = (FIRST_WINDOW_SLOT + slots).view(batch, WINDOW + 1)
        self.tokens = torch.full((layers, batch, WINDOW + 1), -1, dtype=torch.int32, device=device)
        order = torch.arange(WINDOW, dtype=torch.int16, device=device)
        self.lru = order.repeat(layers, batch, 1)
        self.host_locs = pool.req_to_token.long()
        self.rows = torch.arange(batch, dtype=torch.int64, device=device)
        self.lengths = torch.full((batch,), case.positions, dtype=torch.int32, device=device)
        self.num_real = torch.tensor([batch], dtype=torch.int32, device=device)
        self.out = torch.empty((batch, TOP_K), dtype=torch.int32, device=device)

    def __call__(self, layer: int, step: int, topk: torch.Tensor) -> torch.Tensor:
        from sglang.jit_kernel.hisparse import load_cache_to_device_buffer_mla

        load_cache_to_device_buffer_mla(
            top_k_tokens=topk,
            device_buffer_tokens=self.tokens[layer],
            host_cache_locs=self.host_locs,
            device_buffer_locs=self.locs,
            host_cache=self.pool.host[layer].unsqueeze(1),
            device_buffer=self.pool.device[layer].unsqueeze(1),
            top_k_device_locs=self.out,
            req_pool_indices=self.rows,
            seq_lens=self.lengths,
            lru_slots=self.lru[layer],
            item_size_bytes=self.case.row_bytes,
            num_top_k=TOP_K,
            hot_buffer_size=WINDOW,
            block_size=1024,
            num_real_reqs=self.num_real,
        )
        return self.out


def check_rows(case: Case, pool: Pool, layer: int, topk: torch.Tensor, page_table: torch.Tensor) -> None:
    """Every row of the top-k is the host's, bytes at both ends.

    Raises:
        AssertionError: names the layer.
    """
    slots = torch.gather(pool.req_to_token, 1, topk.long()).flatten().cpu().long()
    host, device = pool.host[layer].view(torch.int64), pool.device[layer].view(torch.int64)
    got = device[page_table.flatten().long()].cpu()
    for word in (0, -1):
        wrong = int((got[:, word] != host[slots, word]).sum())
        assert wrong == 0, f"{case}: {wrong} rows of layer {layer} are wrong"


def new_rows(case: Case, pool: Pool, lists: torch.Tensor, step: int) -> torch.Tensor:
    """Host slots of a step's misses, in the order of the top-k: int32 ``[misses]``."""
    new = lists[step] != lists[step - 1]
    owner = torch.arange(case.batch)[:, None].expand_as(new)[new].to(pool.req_to_token.device)
    return pool.req_to_token[owner, lists[step][new].long().to(owner.device)]


def copies(case: Case, pool: Pool, lists: torch.Tensor) -> Dict[str, Callable]:
    """Copies of exactly the rows that a step misses, by other means: name to ``prepare(step)``, which gives ``run(layer)``."""
    # As listed: the list is what is compared.
    queue = kernels.MissQueue(case.batch, TOP_K, pool.host.shape[1], pool.device.device, order_min_rows=NEVER)
    targets = FIRST_WINDOW_SLOT + torch.arange(case.misses, device=pool.device.device)

    def gather(ordered: bool) -> Callable:
        def prepare(step: int) -> Callable:
            slots = new_rows(case, pool, lists, step)
            if ordered:
                slots = slots.sort().values

            def fill() -> None:
                queue.host_slots[: len(slots)] = slots
                queue.device_slots[: len(slots)] = targets.int()
                queue.state[0] = len(slots)

            return fill, lambda layer: kernels.gather_misses(pool.host[layer], pool.device[layer], queue)

        return prepare

    def transfer(step: int) -> Callable:
        from sgl_kernel.kvcacheio import transfer_kv_per_layer_mla

        slots = new_rows(case, pool, lists, step).long()
        return None, lambda layer: transfer_kv_per_layer_mla(
            pool.host[layer], pool.device[layer], slots, targets, case.row_bytes
        )

    def copy(step: int) -> Callable:
        rows = case.misses
        begin = step * rows % max(1, pool.host.shape[1] - rows)
        return None, lambda layer: pool.device[layer, :rows].copy_(pool.host[layer, begin : begin + rows], non_blocking=True)

    return {"transfer_kv": transfer, "gather": gather(False), "gather_sorted": gather(True), "copy": copy}


class Clock:
    """Microseconds of one launch, its start hidden behind a spin kernel."""

    def __init__(self, on_gpu: bool) -> None:
        self._on_gpu = on_gpu

    def __call__(self, run: Callable) -> float:
        if not self._on_gpu:
            run()
            return 0.0
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        torch.cuda._sleep(SPIN_CYCLES)
        begin.record()
        run()
        end.record()
        end.synchronize()
        return begin.elapsed_time(end) * 1e3


def measure(case: Case, memory: HostMemory, max_layers: int, device: str, gpu: str, impls: List[str]) -> List[dict]:
    steps = 1 + WARMUP + TIMED
    pool = Pool(case, memory, max_layers, device)
    clock, rows = Clock(device != "cpu"), []
    scrub = torch.zeros((1 << 30) if device != "cpu" else 1, dtype=torch.uint8)

    def fresh_lists(seed: int) -> torch.Tensor:
        scrub.fill_(seed)
        return topk_lists(case, steps, seed)

    def add(impl: str, times: List[float], misses: int) -> None:
        us = statistics.median(times)
        gb_s = misses * case.row_bytes / us / 1e3 if us else 0.0
        shown = {**asdict(case), "memory": memory.kind, "top_k": TOP_K, "pitch": case.row_bytes, "layers": pool.layers}
        shown["pool_rows"] = pool.host.shape[1]
        rows.append({"impl": impl, "gpu": gpu, **shown, "misses": misses, "us": round(us, 2), "gb_s": round(gb_s, 2)})

    for seed, name in enumerate(impls):
        if name not in case.impls or (name == "copy" and memory.kind == "managed"):
            continue
        lists = fresh_lists(seed)
        if name.startswith("ours") or name == "hisparse":
            as_served = kernels.ORDER_MIN_ROWS_MANAGED if memory.kind == "managed" else kernels.ORDER_MIN_ROWS
            order_min_rows = {"ours_listed": NEVER, "ours_ordered": 0}.get(name, as_served)
            impl = HiSparse(case, pool, steps) if name == "hisparse" else Ours(case, pool, steps, order_min_rows)
            run_swaps(case, pool, lists.to(device), name, impl, clock, add)
        elif case.misses:
            prepare = copies(case, pool, lists)[name]
            times = []
            for step in range(WARMUP + 1, steps):
                fill, run = prepare(step)
                for layer in range(pool.layers):
                    if fill is not None:
                        fill()
                    times.append(clock(lambda: run(layer)))
            add(name, times, case.misses)
    return rows


def cold_launches(pool: Pool, topk: torch.Tensor) -> Iterator[tuple]:
    """Before each launch the device has written more than the L2 cache holds, and then the top-k, as an indexer does."""
    cache = torch.empty(CACHE_BYTES, dtype=torch.uint8, device=pool.device.device)
    for _ in range(TIMED):
        for layer in range(pool.layers):
            cache.fill_(layer)
            yield layer, topk.clone()


def run_swaps(case: Case, pool: Pool, lists: torch.Tensor, name: str, impl: Callable, clock: Clock, add: Callable) -> None:
    """Time one implementation step by step, check the rows it ends with, and for ours time steps without misses."""
    steps, times = len(lists), []
    for step in range(steps):
        for layer in range(pool.layers):
            out = []
            us = clock(lambda: out.append(impl(layer, step, lists[step])))
            if step > WARMUP:
                times.append(us)
    for layer in {0, pool.layers - 1}:
        table = impl(layer, steps - 1, lists[-1])
        check_rows(case, pool, layer, lists[-1], table)
    add(name, times, case.misses)
    if case.new == 0 and name in ("ours", "hisparse"):
        add(f"{name}_cold", [clock(lambda: impl(layer, steps - 1, topk)) for layer, topk in cold_launches(pool, lists[-1])], 0)
    if name == "ours":
        assert int(impl.counters[0, 2]) == case.batch * (TOP_K - case.new) + steps * case.misses, "misses"
        hot = [clock(lambda: impl(layer, steps - 1, lists[-1])) for _ in range(TIMED) for layer in range(pool.layers)]
        add("no_io", hot, 0)


IMPLS = ["ours", "ours_listed", "ours_ordered", "hisparse", "transfer_kv", "gather", "gather_sorted", "copy"]


def host_memory(num_bytes: int, kind: str) -> HostMemory:
    """As a server takes its pool's."""
    from sglang.srt.mem_cache.sparsity.nsa_offload.host_memory import HostBuffer

    buffer = HostBuffer(num_bytes, kind, chunk_bytes=num_bytes)  # a copy may not span registrations
    return HostMemory(kind, buffer.tensor, owner=buffer)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--max-layers", type=int, default=256)
    parser.add_argument("--host-gb", type=float, default=22.1, help="of host memory, for all layers of a case")
    parser.add_argument("--memory", nargs="*", default=["managed", "pinned"], choices=["managed", "pinned"])
    parser.add_argument("--impls", nargs="*", default=IMPLS, choices=IMPLS)
    parser.add_argument("--batches", nargs="*", type=int, help="only cases of these batches")
    args = parser.parse_args()
    gpu, rows = torch.cuda.get_device_name(), []
    chosen = [case for case in CASES if not args.batches or case.batch in args.batches]
    memories = [host_memory(int(args.host_gb * 1e9) // 4096 * 4096, kind) for kind in args.memory]
    for case in tqdm(chosen, unit="case"):
        for memory in memories:
            rows += measure(case, memory, args.max_layers, "cuda", gpu, args.impls)
            args.out.write_text("[\n" + ",\n".join(map(json.dumps, rows)) + "\n]\n")
            gc.collect()
            torch.cuda.empty_cache()
        for row in rows[-2 * len(args.impls) - 2 :]:
            tqdm.write(f"{row['impl']:14} {row['memory']:8} {case}: {row['us']} us, {row['gb_s']} GB/s")


if __name__ == "__main__":
    main()
