"""Which positions each window holds, and when they were last used."""

from __future__ import annotations

from typing import Optional

import torch

from sglang.jit_kernel.nsa_kv_offload import MissQueue, swap_topk


class LRUCacheState:
    """Residency and age of every window in every layer, on the device.

    Keyed by (window, position), never by host slot: a shared prefix has one host slot and may
    sit in many windows. A window belongs to one request row at a time, and
    ``reset_windows`` runs, in forward-stream order, between two owners.

    Args:
        num_layers: layers of this rank.
        num_windows: windows of this rank.
        lru_slots: slots of a window's LRU part; at least the top-k, and a multiple of 4.
        ring_slots: newest rows outside the LRU.
        device: of the tables.

    Attributes:
        position_at_offset: ``[L, num_windows, lru_slots]`` int32, -1 where empty.
        last_used: ``[L, num_windows, lru_slots]`` int16, low bits of the sequence length at the
            last use.
        ring_begin: ``[num_windows]`` int32 first position written to the ring by decoding.
        counters: ``[L, 3]`` int64 sums of LRU hits, ring hits and misses.
    """

    def __init__(
        self,
        num_layers: int,
        num_windows: int,
        lru_slots: int,
        ring_slots: int,
        device: str,
    ):
        self.num_layers = num_layers
        self.num_windows = num_windows
        self.lru_slots = lru_slots
        self.ring_slots = ring_slots
        shape = (num_layers, num_windows)
        self.position_at_offset = torch.full(
            (*shape, lru_slots), -1, dtype=torch.int32, device=device
        )
        self.ring_begin = torch.zeros((num_windows,), dtype=torch.int32, device=device)
        self.counters = torch.zeros((num_layers, 3), dtype=torch.int64, device=device)
        self.last_used = torch.zeros((*shape, lru_slots), dtype=torch.int16, device=device)

    # An empty slot looks this old to a window's first step: older than any that holds a row. Stamps
    # have 16 bits: after as many steps an empty slot looks young, which costs hits and nothing else.
    EMPTY_AGE = 1 << 15

    @staticmethod
    def bytes_per_window(num_layers: int, lru_slots: int) -> int:
        """Device bytes of one window's tables."""
        return num_layers * (4 + 2) * lru_slots + 4

    def prepare_layer_swap(
        self,
        layer: int,
        topk: torch.Tensor,
        batch_windows: torch.Tensor,
        seq_lens: torch.Tensor,
        request_rows: torch.Tensor,
        req_to_token: torch.Tensor,
        first_window_slot: int,
        queue: MissQueue,
        queries: int = 1,
        out: Optional[torch.Tensor] = None,
    ) -> torch.Tensor:
        """Enter a layer's top-k into the tables and queue its misses, in one launch.

        The loaded rows are entered and their victims forgotten at once: nothing may read the
        device slots before the queue has been copied.

        Args:
            layer: index within this rank.
            topk: ``[B, Q * K]`` int32 positions, -1 for none, contiguous; a request's queries one
                after the other.
            batch_windows: ``[B]`` int32, -1 for padding.
            seq_lens: ``[B]`` int32 with this step's tokens.
            request_rows: ``[B]`` int32 request rows.
            req_to_token: ``[rows, >= context]`` int32 host slots.
            first_window_slot: device slot of window 0.
            queue: empty; filled.
            queries: Q; the first one's token stays, the others' may be refused.
            out: ``[B, Q * K]`` int32, contiguous; what is returned, allocated if unset.

        Returns:
            ``[B, Q * K]`` int32 device slots in the order of the top-k.
        """
        return swap_topk(
            topk,
            batch_windows,
            request_rows,
            seq_lens,
            self.ring_begin,
            req_to_token,
            self.position_at_offset[layer],
            self.last_used[layer],
            self.counters[layer],
            queue,
            topk.shape[1] // queries,
            self.ring_slots,
            first_window_slot,
            self.lru_slots + self.ring_slots,
            out,
        )

    def begin_windows(self, windows: torch.Tensor, first_positions: torch.Tensor) -> None:
        """Give empty windows to requests, on the current stream.

        Args:
            windows: ``[n]`` int64 window indices.
            first_positions: ``[n]`` first position that decoding writes to each ring.
        """
        self.ring_begin[windows] = first_positions.int()
        stamps = (first_positions + 1 - self.EMPTY_AGE).short()
        self.last_used[:, windows] = stamps[None, :, None]

    def reset_windows(self, windows: torch.Tensor) -> None:
        """Empty windows in every layer, on the current stream.

        Args:
            windows: ``[n]`` int64 window indices.
        """
        self.position_at_offset.index_fill_(1, windows, -1)
        self.ring_begin.index_fill_(0, windows, 0)

    def resident_entries(self) -> int:
        """Positions held over all windows and layers; synchronizes."""
        return int((self.position_at_offset >= 0).sum())
