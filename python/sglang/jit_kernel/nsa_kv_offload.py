"""CUDA kernels of decode KV offloading: top-k rows into device windows, new rows to the host.

A swap is two launches a layer. ``swap_topk`` (a block a request) splits the top-k into hits and
misses by a table of the top-k in shared memory, gives the misses the least recently used slots,
keeps the windows' tables, and queues what to load; ``gather_misses`` copies the queue's rows over as
many blocks as fill the link. Its launch overlaps the swap, and waits for the swap's end before it
reads: that is their only barrier. Both read on the device how much there is to do, so a CUDA graph can replay them.
``store_rows`` is the way back.

Words: *position* in a sequence; *host slot*, row of the host pool; *window offset*, slot in a
request's window, the LRU part first and then the ring of newest rows; *device slot*, row of the device
buffer.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Optional

import torch

from sglang.jit_kernel.utils import cache_once, load_jit, make_cpp_args

if TYPE_CHECKING:
    from tvm_ffi.module import Module

SWAP_THREADS = 1024
SWAP_TABLE_PLACES = 1 << 15  # positions so far apart share a place in the table of a top-k
GATHER_THREADS = 512
# Fewer do not fill the link; rows in flight of more share fewer translations.
GATHER_BLOCKS = 20
GATHER_ROWS_IN_FLIGHT = 4  # a warp
STORE_THREADS = 512
STORE_BLOCKS = 8
STORE_UNITS_IN_FLIGHT = 4  # a thread
# Fewer rows are gathered as listed: to find their order costs more than scattered reads. Of
# managed memory they cost little more than others.
ORDER_MIN_ROWS = 1024
ORDER_MIN_ROWS_MANAGED = 16384
_NUM_STATES = 4
MAX_WINDOW_SLOTS = 1 << 15  # window offsets are int16
MAX_SHARED_BYTES = 227 << 10  # of a thread block, on Hopper and on data centre Blackwell
_SWAP_SHARED_BYTES = 644  # sizeof(SwapShared)


def swap_shared_bytes(entries: int, lru_slots: int) -> int:
    """Shared memory that a thread block of the swap needs, at most ``MAX_SHARED_BYTES``.

    Args:
        entries: of a request in one swap: top-k, times the query tokens of a step.
        lru_slots: of a window.
    """
    return _SWAP_SHARED_BYTES + 2 * SWAP_TABLE_PLACES + 8 * entries + lru_slots


class MissQueue:
    """Rows that one layer's swap wants from the host; empty again when they have been gathered.

    Layers on one stream share one queue.

    Args:
        max_batch: requests in a batch, without padding.
        top_k: entries of a request's top-k.
        num_host_rows: rows of the host pool.
        device: of the queue.
        order_min_rows: from as many rows on they are gathered in the order of their host
            addresses.

    Attributes:
        host_slots: ``[2 * max_batch * top_k]`` int32, the rows as listed; from the middle on those
            that were wanted before.
        device_slots: ``[2 * max_batch * top_k]`` int32.
        wanted: ``[ceil(num_host_rows / 32)]`` int32, a bit for each host slot.
        target: ``[num_host_rows]`` int32 device slot of a wanted host slot.
        state: ``[4]`` int32 counts.
    """

    def __init__(
        self,
        max_batch: int,
        top_k: int,
        num_host_rows: int,
        device,
        order_min_rows: int = ORDER_MIN_ROWS,
    ):
        self.order_min_rows = order_min_rows

        def zeros(size: int) -> torch.Tensor:
            return torch.zeros((size,), dtype=torch.int32, device=device)

        self.host_slots = zeros(2 * max_batch * top_k)
        self.device_slots = zeros(2 * max_batch * top_k)
        self.wanted = zeros(-(-num_host_rows // 32))
        self.target = zeros(num_host_rows)
        self.state = zeros(_NUM_STATES)

    # Device bytes, beside a few words.
    BYTES_PER_ENTRY = 16
    BYTES_PER_HOST_ROW = 4 + 1 / 8

    def tensors(self) -> tuple[torch.Tensor, ...]:
        """The tensors, in the kernels' order."""
        return (self.host_slots, self.device_slots, self.wanted, self.target, self.state)


def compile_kernels(top_k: int, row_bytes: int) -> None:
    """Compile what a server will need, or load it from SGLang's JIT cache, before its first step."""
    _swap_module(top_k)
    _gather_module(row_bytes)
    _store_module(row_bytes)


def swap_topk(
    topk: torch.Tensor,
    batch_windows: torch.Tensor,
    request_rows: torch.Tensor,
    seq_lens: torch.Tensor,
    ring_begin: torch.Tensor,
    req_to_token: torch.Tensor,
    position_at_offset: torch.Tensor,
    last_used: torch.Tensor,
    counters: torch.Tensor,
    queue: MissQueue,
    lasting: int,
    ring_slots: int,
    first_window_slot: int,
    window_slots: int,
    out: Optional[torch.Tensor] = None,
) -> torch.Tensor:
    """Make one layer's top-k resident: tables, page table, and the queue of rows to load.

    A verify step of speculative decoding has Q queries a request: their top-k lists stand one after
    the other, E entries in all, and all become resident together. Only the first query's token is
    sure to stay, so only its entries (``lasting``) count as uses: what the drafts alone select is
    there for this step, and is no younger after it; loaded, it is older than what was used in the
    last 16K steps.

    ``gather_misses`` must follow on the same stream before anything reads the device slots. Entries
    with the same position get the same slot and one load. Victims are the least recently used slots that
    this top-k does not touch; ages of 16 steps and more are compared in steps of an eighth of their
    power of two.

    Args:
        topk: ``[B, E]`` int32 positions, -1 for none, contiguous; E at most ``lru_slots``.
        batch_windows: ``[B]`` int32 window of each batch row, -1 for padding; no window twice.
        request_rows: ``[B]`` int32 request rows.
        seq_lens: ``[B]`` int32 length with this step's tokens; grows from step to step.
        ring_begin: ``[num_windows]`` int32 first position that decoding wrote to the ring.
        req_to_token: ``[rows, >= context]`` int32 host slots.
        position_at_offset: ``[num_windows, lru_slots]`` int32, -1 where empty, no position twice in a
            window; lru_slots a multiple of 4; changed.
        last_used: ``[num_windows, lru_slots]`` int16, low bits of the length at the last use;
            changed.
        counters: ``[3]`` int64; hits, ring hits and misses (each load once) are added.
        queue: empty on entry.
        lasting: leading entries of a row that count as uses; E, the top-k, without speculation.
        ring_slots: slots of the ring, at offsets ``lru_slots + position % ring_slots``.
        first_window_slot: device slot of window 0.
        window_slots: device slots from one window to the next.
        out: ``[B, E]`` int32, contiguous; what is returned, allocated if unset.

    Returns:
        ``[B, E]`` int32 device slots in the order of the top-k; -1 for none, 0 in padded rows.
    """
    page_table = torch.empty_like(topk) if out is None else out
    _swap_module(topk.shape[1]).run(
        topk,
        batch_windows,
        request_rows,
        seq_lens,
        ring_begin,
        req_to_token,
        position_at_offset,
        last_used,
        counters,
        page_table,
        *queue.tensors(),
        lasting,
        ring_slots,
        first_window_slot,
        window_slots,
    )
    return page_table


def gather_misses(
    host_rows: torch.Tensor,
    device_rows: torch.Tensor,
    queue: MissQueue,
    blocks: int = GATHER_BLOCKS,
) -> None:
    """Copy the queued rows of one layer from the host, and empty the queue.

    From the queue's ``order_min_rows`` on in the order of their host addresses.

    Args:
        host_rows: ``[num_host_rows, row_bytes]`` uint8, pinned or managed; row_bytes a multiple
            of 16.
        device_rows: ``[num_device_rows, row_bytes]`` uint8.
        queue: as ``swap_topk`` filled it.
        blocks: thread blocks; few fill the link.
    """
    _gather_module(host_rows.shape[1]).run(
        host_rows, device_rows, *queue.tensors(), queue.order_min_rows, blocks
    )


def store_rows(
    device_layers: torch.Tensor,
    host_layers: torch.Tensor,
    device_slots: torch.Tensor,
    host_slots: torch.Tensor,
    row_bytes: int,
    blocks: int = STORE_BLOCKS,
) -> None:
    """Copy the same rows of some layers from the device to the host pool.

    Rows that follow each other in both pools are copied as one run of bytes.

    Args:
        device_layers: ``[L]`` uint64 addresses of the layers' rows on the device.
        host_layers: ``[L]`` uint64 addresses of the layers' rows on the host, pinned or managed.
        device_slots: ``[n]`` int64; n may be 0.
        host_slots: ``[n]`` int64, none twice.
        row_bytes: a multiple of 16.
        blocks: thread blocks; few fill the link.
    """
    _store_module(row_bytes).run(device_layers, host_layers, device_slots, host_slots, blocks)


@cache_once
def _swap_module(top_k: int) -> Module:
    args = make_cpp_args(SWAP_THREADS, -(-top_k // SWAP_THREADS), SWAP_TABLE_PLACES)
    return load_jit(
        "nsa_kv_offload_swap",
        *args,
        cuda_files=["nsa_kv_offload/launch.cuh"],
        cuda_wrappers=[("run", f"nsa_kv_offload::Swap<{args}>::run")],
    )


@cache_once
def _gather_module(row_bytes: int) -> Module:
    args = make_cpp_args(GATHER_THREADS, row_bytes, GATHER_ROWS_IN_FLIGHT)
    return load_jit(
        "nsa_kv_offload_gather",
        *args,
        cuda_files=["nsa_kv_offload/launch.cuh"],
        cuda_wrappers=[("run", f"nsa_kv_offload::Gather<{args}>::run")],
    )


@cache_once
def _store_module(row_bytes: int) -> Module:
    args = make_cpp_args(STORE_THREADS, row_bytes, STORE_UNITS_IN_FLIGHT)
    return load_jit(
        "nsa_kv_offload_store",
        *args,
        cuda_files=["nsa_kv_offload/launch.cuh"],
        cuda_wrappers=[("run", f"nsa_kv_offload::Store<{args}>::run")],
    )
