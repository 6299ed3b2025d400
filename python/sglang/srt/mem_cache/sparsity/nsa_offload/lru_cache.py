"""Which positions each window holds, and in which order they were last used."""

from __future__ import annotations

from typing import NamedTuple

import torch

from sglang.jit_kernel.triton import nsa_kv_offload as kernels


class LayerSwap(NamedTuple):
    """What one layer's step finds resident and what it must load.

    The hits are final before any copy has run, so attention over them could start then.

    Attributes:
        window_offsets: ``[B, K]`` int32 offset of each resident top-k entry; -1 for a miss
            and for none.
        miss_rank: ``[B, K]`` int32 place of each miss in ``miss_positions``; -1 otherwise.
        miss_positions: ``[B, K]`` int32 positions to load, packed to the left, then -1.
        miss_count: ``[B]`` int32.
        victim_offsets: ``[B, K]`` int32 window offset for each miss, then -1.
    """

    window_offsets: torch.Tensor
    miss_rank: torch.Tensor
    miss_positions: torch.Tensor
    miss_count: torch.Tensor
    victim_offsets: torch.Tensor


class LRUCacheState:
    """Residency and age of every window in every layer, on the device.

    Keyed by (window, position), never by host slot: a shared prefix has one host slot and may
    sit in many windows. A window belongs to one request row at a time, and
    ``reset_windows`` runs, in forward-stream order, between two owners.

    Args:
        num_layers: layers of this rank.
        num_windows: windows of this rank.
        lru_slots: slots of a window's LRU part; at least the top-k.
        ring_slots: newest rows outside the LRU.
        max_context: positions a request can have.
        device: of the tables.

    Attributes:
        offset_of_position: ``[L, num_windows, max_context]`` int16, -1 where not resident.
        position_at_offset: ``[L, num_windows, lru_slots]`` int32, -1 where empty.
        lru_order: ``[L, num_windows, lru_slots]`` int16 offsets, oldest first.
        ring_begin: ``[num_windows]`` int32 first position written to the ring by decoding.
        counters: ``[L, 3]`` int64 sums of LRU hits, ring hits and misses.
    """

    def __init__(
        self,
        num_layers: int,
        num_windows: int,
        lru_slots: int,
        ring_slots: int,
        max_context: int,
        device: str,
    ):
        self.num_layers = num_layers
        self.num_windows = num_windows
        self.lru_slots = lru_slots
        self.ring_slots = ring_slots
        shape = (num_layers, num_windows)
        self.offset_of_position = torch.full(
            (*shape, max_context), -1, dtype=torch.int16, device=device
        )
        self.position_at_offset = torch.full(
            (*shape, lru_slots), -1, dtype=torch.int32, device=device
        )
        self.ring_begin = torch.zeros((num_windows,), dtype=torch.int32, device=device)
        self.counters = torch.zeros((num_layers, 3), dtype=torch.int64, device=device)
        self._init_ages(device)

    def _init_ages(self, device: str) -> None:
        shape = (self.num_layers, self.num_windows)
        self._first_order = torch.arange(self.lru_slots, dtype=torch.int16, device=device)
        self.lru_order = self._first_order.repeat(*shape, 1)
        # Marks of the layer being processed; layers run one after another on one stream.
        self._touched = torch.zeros(
            (self.num_windows, self.lru_slots), dtype=torch.uint8, device=device
        )

    @staticmethod
    def bytes_per_window(num_layers: int, lru_slots: int, max_context: int) -> int:
        """Device bytes of one window's tables."""
        return num_layers * (2 * max_context + (4 + 2) * lru_slots) + lru_slots + 4

    def prepare_layer_swap(
        self,
        layer: int,
        topk: torch.Tensor,
        batch_windows: torch.Tensor,
        seq_lens: torch.Tensor,
    ) -> LayerSwap:
        """Split a layer's top-k into hits and misses and choose victims for the misses.

        Changes nothing but the marks, which ``lru_post_process`` consumes; call it exactly
        once afterwards.

        Args:
            layer: index within this rank.
            topk: ``[B, K]`` int32 positions, -1 for none, contiguous.
            batch_windows: ``[B]`` int32, -1 for padding.
            seq_lens: ``[B]`` with this step's token.
        """
        window_offsets, miss_rank, miss_positions, miss_count = kernels.resolve_topk(
            topk,
            batch_windows,
            seq_lens,
            self.ring_begin,
            self.offset_of_position[layer],
            self._touched,
            self.counters[layer],
            self.lru_slots,
            self.ring_slots,
        )
        victim_offsets = kernels.pick_victims(
            batch_windows,
            miss_count,
            self.lru_order[layer],
            self._touched,
            topk.shape[1],
        )
        return LayerSwap(
            window_offsets, miss_rank, miss_positions, miss_count, victim_offsets
        )

    def lru_post_process(
        self, layer: int, batch_windows: torch.Tensor, swap: LayerSwap
    ) -> None:
        """Enter the loaded rows, forget the victims, and restore the order by age."""
        kernels.lru_post_process(
            batch_windows,
            swap.miss_count,
            swap.miss_positions,
            swap.victim_offsets,
            self.lru_order[layer],
            self._touched,
            self.position_at_offset[layer],
            self.offset_of_position[layer],
        )

    def begin_windows(self, windows: torch.Tensor, first_positions: torch.Tensor) -> None:
        """Give empty windows to requests, on the current stream.

        Args:
            windows: ``[n]`` int64 window indices.
            first_positions: ``[n]`` first position that decoding writes to each ring.
        """
        self.ring_begin[windows] = first_positions.int()

    def reset_windows(self, windows: torch.Tensor) -> None:
        """Empty windows in every layer, on the current stream.

        Args:
            windows: ``[n]`` int64 window indices.
        """
        self.offset_of_position[:, windows] = -1
        self.position_at_offset[:, windows] = -1
        self.lru_order[:, windows] = self._first_order
        self.ring_begin[windows] = 0

    def check_integrity(self) -> None:
        """Check that the tables agree; for idle moments, since it synchronizes.

        Raises:
            RuntimeError: names the table and the place.
        """
        self._check_ages()
        held = self.offset_of_position >= 0
        layers, windows, positions = held.nonzero(as_tuple=True)
        offsets = self.offset_of_position[held].long()
        if not torch.equal(
            self.position_at_offset[layers, windows, offsets].long(), positions
        ):
            raise RuntimeError("offset_of_position and position_at_offset disagree.")
        if int(held.sum()) != int((self.position_at_offset >= 0).sum()):
            raise RuntimeError("A window offset holds a position that no table entry has.")

    def _check_ages(self) -> None:
        order = self.lru_order.sort(dim=-1).values
        if not torch.equal(order, self._first_order.expand_as(order)):
            raise RuntimeError("lru_order is not a permutation of the window offsets.")
        if self._touched.any():
            raise RuntimeError("A swap was prepared, but never post-processed.")

    def resident_entries(self) -> int:
        """Positions held over all windows and layers; synchronizes."""
        return int((self.offset_of_position >= 0).sum())
