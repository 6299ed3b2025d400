"""Triton kernels that map a sparse attention step onto per-request device windows.

Words used here, each for one thing:

* *position*: index of a token in its request's sequence.
* *host slot*: row of the host pool; SGLang's logical slot in ``req_to_token``.
* *device slot*: row of the device window buffer.
* *window offset*: device slot relative to the first slot of the request's window.
  Offsets ``[0, lru_slots)`` are the LRU part, ``[lru_slots, lru_slots + ring_slots)``
  the ring of newest rows.

Every kernel runs one program per batch row, defines all of its outputs, maps -1 to -1, and
does nothing to the state of a row whose window is -1 (padding). Addresses are int64.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl


@triton.jit
def _resolve_topk_kernel(
    topk_ptr,  # [B, K] int32 positions, -1 for none
    batch_windows_ptr,  # [B] int32, -1 for padding
    seq_lens_ptr,  # [B] length including the token of this step
    ring_begin_ptr,  # [num_windows] int32
    offset_of_position_ptr,  # [num_windows, C] int16 of one layer
    touched_ptr,  # [num_windows, lru_slots] uint8
    counters_ptr,  # [3] int64 of one layer: LRU hits, ring hits, misses
    window_offsets_ptr,  # out [B, K] int32
    miss_rank_ptr,  # out [B, K] int32
    miss_positions_ptr,  # out [B, K] int32
    miss_count_ptr,  # out [B] int32
    K,
    C,
    lru_slots,
    ring_slots,
    BLOCK_K: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    window = tl.load(batch_windows_ptr + row).to(tl.int64)
    cols = tl.arange(0, BLOCK_K)
    in_row = cols < K
    position = tl.load(topk_ptr + row * K + cols, mask=in_row, other=-1).to(tl.int64)
    position = tl.where(window >= 0, position, -1)
    wanted = position >= 0

    owner = tl.maximum(window, 0)
    seq_len = tl.load(seq_lens_ptr + row).to(tl.int64)
    ring_begin = tl.load(ring_begin_ptr + owner).to(tl.int64)
    first_in_ring = tl.maximum(ring_begin, seq_len - ring_slots)
    in_ring = wanted & (position >= first_in_ring)

    in_lru = wanted & (position < first_in_ring)
    offset = tl.load(
        offset_of_position_ptr + owner * C + position, mask=in_lru, other=-1
    ).to(tl.int32)
    hit = in_lru & (offset >= 0)
    miss = in_lru & (offset < 0)
    tl.store(
        touched_ptr + owner * lru_slots + offset,
        tl.full([BLOCK_K], 1, tl.uint8),
        mask=hit,
    )

    ring_offset = (lru_slots + position % ring_slots).to(tl.int32)
    resolved = tl.where(in_ring, ring_offset, tl.where(hit, offset, -1))
    tl.store(window_offsets_ptr + row * K + cols, resolved, mask=in_row)

    miss_int = miss.to(tl.int32)
    rank = tl.cumsum(miss_int, 0) - miss_int
    count = tl.sum(miss_int, 0)
    tl.store(miss_rank_ptr + row * K + cols, tl.where(miss, rank, -1), mask=in_row)
    tl.store(miss_count_ptr + row, count)
    # The first `count` entries are written by the scatter, the rest by the fill: no overlap.
    tl.store(miss_positions_ptr + row * K + rank, position.to(tl.int32), mask=miss)
    tl.store(
        miss_positions_ptr + row * K + cols,
        tl.full([BLOCK_K], -1, tl.int32),
        mask=in_row & (cols >= count),
    )

    hits = tl.sum(hit.to(tl.int32), 0)
    ring_hits = tl.sum(in_ring.to(tl.int32), 0)
    tl.atomic_add(counters_ptr + 0, hits.to(tl.int64))
    tl.atomic_add(counters_ptr + 1, ring_hits.to(tl.int64))
    tl.atomic_add(counters_ptr + 2, count.to(tl.int64))


@triton.jit
def _pick_victims_kernel(
    batch_windows_ptr,
    miss_count_ptr,
    lru_order_ptr,  # [num_windows, lru_slots] int16, oldest first
    touched_ptr,
    victim_offsets_ptr,  # out [B, K] int32
    K,
    lru_slots,
    BLOCK_K: tl.constexpr,
    BLOCK_W: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    window = tl.load(batch_windows_ptr + row).to(tl.int64)
    count = tl.load(miss_count_ptr + row)
    owner = tl.maximum(window, 0)
    slots = tl.arange(0, BLOCK_W)
    live = slots < tl.where(window >= 0, lru_slots, 0)
    offset = tl.load(lru_order_ptr + owner * lru_slots + slots, mask=live, other=0).to(
        tl.int32
    )
    touched = tl.load(touched_ptr + owner * lru_slots + offset, mask=live, other=1)
    free = (live & (touched == 0)).to(tl.int32)
    rank = tl.cumsum(free, 0) - free
    tl.store(
        victim_offsets_ptr + row * K + rank, offset, mask=(free == 1) & (rank < count)
    )
    cols = tl.arange(0, BLOCK_K)
    tl.store(
        victim_offsets_ptr + row * K + cols,
        tl.full([BLOCK_K], -1, tl.int32),
        mask=(cols < K) & (cols >= count),
    )


@triton.jit
def _lru_post_process_kernel(
    batch_windows_ptr,
    miss_count_ptr,
    miss_positions_ptr,
    victim_offsets_ptr,
    lru_order_ptr,  # in/out
    touched_ptr,  # in/out, left all zero
    position_at_offset_ptr,  # [num_windows, lru_slots] int32, in/out
    offset_of_position_ptr,  # [num_windows, C] int16, in/out
    K,
    C,
    lru_slots,
    BLOCK_K: tl.constexpr,
    BLOCK_W: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    window = tl.load(batch_windows_ptr + row).to(tl.int64)
    if window >= 0:
        count = tl.load(miss_count_ptr + row)
        positions_at = position_at_offset_ptr + window * lru_slots
        offsets_of = offset_of_position_ptr + window * C
        order = lru_order_ptr + window * lru_slots
        touches = touched_ptr + window * lru_slots

        # Evict: forget the old position of a victim, unless it has moved elsewhere since.
        cols = tl.arange(0, BLOCK_K)
        loaded = cols < count
        victim = tl.load(victim_offsets_ptr + row * K + cols, mask=loaded, other=0)
        new = tl.load(miss_positions_ptr + row * K + cols, mask=loaded, other=0)
        old = tl.load(positions_at + victim, mask=loaded, other=-1)
        held = loaded & (old >= 0)
        current = tl.load(offsets_of + old, mask=held, other=-1).to(tl.int32)
        tl.store(
            offsets_of + old,
            tl.full([BLOCK_K], -1, tl.int16),
            mask=held & (current == victim),
        )
        # All evictions are visible before any admission: a position may be both.
        tl.debug_barrier()
        tl.store(positions_at + victim, new, mask=loaded)
        tl.store(offsets_of + new, victim.to(tl.int16), mask=loaded)

        # Age: untouched and not evicted keep their order, then hits, then the new rows.
        slots = tl.arange(0, BLOCK_W)
        live = slots < lru_slots
        offset = tl.load(order + slots, mask=live, other=0)
        touched = tl.load(touches + offset.to(tl.int32), mask=live, other=1)
        free = (live & (touched == 0)).to(tl.int32)
        used = (live & (touched != 0)).to(tl.int32)
        free_rank = tl.cumsum(free, 0) - free
        used_rank = tl.cumsum(used, 0) - used
        num_free = tl.sum(free, 0)
        evicted = (free == 1) & (free_rank < count)
        place = tl.where(
            evicted,
            lru_slots - count + free_rank,
            tl.where(free == 1, free_rank - count, num_free - count + used_rank),
        )
        tl.debug_barrier()  # every load of the old order and flags is done
        tl.store(order + place, offset, mask=live)
        tl.store(touches + slots, tl.full([BLOCK_W], 0, tl.uint8), mask=live)


@triton.jit
def _build_gpu_page_table_kernel(
    topk_ptr,
    batch_windows_ptr,
    window_offsets_ptr,
    miss_rank_ptr,
    victim_offsets_ptr,
    page_table_ptr,  # out [B, K] int32 device slots
    miss_slots_ptr,  # out [B, K] int64 device slots of the victims
    K,
    first_window_slot,
    window_slots,
    BLOCK_K: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    window = tl.load(batch_windows_ptr + row).to(tl.int64)
    base = first_window_slot + window * window_slots
    cols = tl.arange(0, BLOCK_K)
    in_row = cols < K
    position = tl.load(topk_ptr + row * K + cols, mask=in_row, other=-1)
    offset = tl.load(window_offsets_ptr + row * K + cols, mask=in_row, other=-1)
    rank = tl.load(miss_rank_ptr + row * K + cols, mask=in_row, other=-1)
    victim_of_rank = tl.load(
        victim_offsets_ptr + row * K + rank, mask=in_row & (rank >= 0), other=-1
    )
    offset = tl.where(rank >= 0, victim_of_rank, offset)
    # A padded row reads the dummy slot 0, as it does in the base; it owns no window.
    unresolved = tl.where(window < 0, 0, -1)
    slot = tl.where(
        offset >= 0, base + offset, tl.where(position >= 0, unresolved, -1)
    )
    tl.store(page_table_ptr + row * K + cols, slot.to(tl.int32), mask=in_row)

    victim = tl.load(victim_offsets_ptr + row * K + cols, mask=in_row, other=-1)
    victim_slot = tl.where(victim >= 0, base + victim, -1)
    tl.store(miss_slots_ptr + row * K + cols, victim_slot.to(tl.int64), mask=in_row)


@triton.jit
def _map_positions_kernel(
    positions_ptr,  # [B, K] int32, -1 for none
    batch_rows_ptr,  # [B] int32 request rows
    req_to_token_ptr,  # [rows, stride] int32 host slots
    host_slots_ptr,  # out [B, K] int64
    K,
    row_stride,
    BLOCK_K: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    request_row = tl.load(batch_rows_ptr + row).to(tl.int64)
    cols = tl.arange(0, BLOCK_K)
    in_row = cols < K
    position = tl.load(positions_ptr + row * K + cols, mask=in_row, other=-1).to(
        tl.int64
    )
    known = in_row & (position >= 0)
    host_slot = tl.load(
        req_to_token_ptr + request_row * row_stride + position, mask=known, other=-1
    ).to(tl.int64)
    tl.store(host_slots_ptr + row * K + cols, host_slot, mask=in_row)


def resolve_topk(
    topk: torch.Tensor,
    batch_windows: torch.Tensor,
    seq_lens: torch.Tensor,
    ring_begin: torch.Tensor,
    offset_of_position: torch.Tensor,
    touched: torch.Tensor,
    counters: torch.Tensor,
    lru_slots: int,
    ring_slots: int,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Split one layer's top-k into hits and misses; mark the hits as touched.

    Args:
        topk: ``[B, K]`` int32 positions, -1 for none, without duplicates.
        batch_windows: ``[B]`` int32 window of each batch row, -1 for padding.
        seq_lens: ``[B]`` sequence length with this step's token.
        ring_begin: ``[num_windows]`` int32 first position that decoding wrote to the ring.
        offset_of_position: ``[num_windows, C]`` int16, one layer; -1 for not resident.
        touched: ``[num_windows, lru_slots]`` uint8, all zero on entry.
        counters: ``[3]`` int64; LRU hits, ring hits and misses are added.

    Returns:
        ``window_offsets`` ``[B, K]`` int32 (-1 for none and for misses), ``miss_rank``
        ``[B, K]`` int32 (-1 for none and for hits), ``miss_positions`` ``[B, K]`` int32
        (the first ``miss_count`` of a row, then -1) and ``miss_count`` ``[B]`` int32.
    """
    bs, k = topk.shape
    window_offsets, miss_rank, miss_positions = (
        torch.empty((bs, k), dtype=torch.int32, device=topk.device) for _ in range(3)
    )
    miss_count = torch.empty((bs,), dtype=torch.int32, device=topk.device)
    if bs:
        _resolve_topk_kernel[(bs,)](
            topk,
            batch_windows,
            seq_lens,
            ring_begin,
            offset_of_position,
            touched,
            counters,
            window_offsets,
            miss_rank,
            miss_positions,
            miss_count,
            k,
            offset_of_position.shape[1],
            lru_slots,
            ring_slots,
            BLOCK_K=triton.next_power_of_2(k),
        )
    return window_offsets, miss_rank, miss_positions, miss_count


def pick_victims(
    batch_windows: torch.Tensor,
    miss_count: torch.Tensor,
    lru_order: torch.Tensor,
    touched: torch.Tensor,
    k: int,
) -> torch.Tensor:
    """Choose the ``miss_count`` least recently used, untouched offsets of each window.

    Args:
        lru_order: ``[num_windows, lru_slots]`` int16 window offsets, oldest first.
        k: width of the result; at most ``lru_slots``.

    Returns:
        ``[B, k]`` int32 window offsets, oldest first, -1 past ``miss_count``.
    """
    bs = miss_count.shape[0]
    victims = torch.empty((bs, k), dtype=torch.int32, device=lru_order.device)
    if bs:
        _pick_victims_kernel[(bs,)](
            batch_windows,
            miss_count,
            lru_order,
            touched,
            victims,
            k,
            lru_order.shape[1],
            BLOCK_K=triton.next_power_of_2(k),
            BLOCK_W=triton.next_power_of_2(lru_order.shape[1]),
        )
    return victims


def lru_post_process(
    batch_windows: torch.Tensor,
    miss_count: torch.Tensor,
    miss_positions: torch.Tensor,
    victim_offsets: torch.Tensor,
    lru_order: torch.Tensor,
    touched: torch.Tensor,
    position_at_offset: torch.Tensor,
    offset_of_position: torch.Tensor,
) -> None:
    """Commit a swap: forget the victims, enter the new rows, age the order, clear the marks.

    Changes ``lru_order``, ``touched``, ``position_at_offset`` and ``offset_of_position`` of
    one layer in place, for the windows of the batch only.
    """
    bs, k = victim_offsets.shape
    if bs:
        _lru_post_process_kernel[(bs,)](
            batch_windows,
            miss_count,
            miss_positions,
            victim_offsets,
            lru_order,
            touched,
            position_at_offset,
            offset_of_position,
            k,
            offset_of_position.shape[1],
            lru_order.shape[1],
            BLOCK_K=triton.next_power_of_2(k),
            BLOCK_W=triton.next_power_of_2(lru_order.shape[1]),
        )


def build_gpu_page_table(
    topk: torch.Tensor,
    batch_windows: torch.Tensor,
    window_offsets: torch.Tensor,
    miss_rank: torch.Tensor,
    victim_offsets: torch.Tensor,
    first_window_slot: int,
    window_slots: int,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Turn window offsets into device slots, in the order of the top-k.

    Returns:
        ``page_table`` ``[B, K]`` int32 device slots for the attention kernel (-1 for none;
        a padded row reads the dummy slot 0) and ``miss_slots`` ``[B, K]`` int64 device slots
        to copy the misses to, in the order of ``miss_positions`` (-1 past the last).
    """
    bs, k = topk.shape
    page_table = torch.empty((bs, k), dtype=torch.int32, device=topk.device)
    miss_slots = torch.empty((bs, k), dtype=torch.int64, device=topk.device)
    if bs:
        _build_gpu_page_table_kernel[(bs,)](
            topk,
            batch_windows,
            window_offsets,
            miss_rank,
            victim_offsets,
            page_table,
            miss_slots,
            k,
            first_window_slot,
            window_slots,
            BLOCK_K=triton.next_power_of_2(k),
        )
    return page_table, miss_slots


def map_seq_positions_to_host_slots(
    positions: torch.Tensor, batch_rows: torch.Tensor, req_to_token: torch.Tensor
) -> torch.Tensor:
    """Look up the host slots of sequence positions.

    Args:
        positions: ``[B, K]`` int32, -1 for none.
        batch_rows: ``[B]`` int32 request rows.
        req_to_token: ``[rows, max_context]`` int32; serves as ``req_seq_to_host_slot``,
            since a logical slot is a host slot.

    Returns:
        ``[B, K]`` int64 host slots, -1 where the position is -1.
    """
    bs, k = positions.shape
    host_slots = torch.empty((bs, k), dtype=torch.int64, device=positions.device)
    if bs:
        _map_positions_kernel[(bs,)](
            positions,
            batch_rows,
            req_to_token,
            host_slots,
            k,
            req_to_token.stride(0),
            BLOCK_K=triton.next_power_of_2(k),
        )
    return host_slots
