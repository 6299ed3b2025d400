"""The swap of a layer by the CUDA kernels: two launches on the forward's own stream."""

from __future__ import annotations

from typing import Any

import torch

from sglang.jit_kernel.nsa_kv_offload import MissQueue, compile_kernels, swap_topk
from sglang.srt.mem_cache.sparsity.backend.backend_adaptor import NSABackendAdaptor
from sglang.srt.mem_cache.sparsity.nsa_offload.lru_cache import LRUCacheState


class FusedLRUCacheState(LRUCacheState):
    """Residency as in the base class; age by stamps in place of an order.

    Attributes:
        last_used: ``[L, num_windows, lru_slots]`` int16, low bits of the sequence length at the
            last use.
    """

    # An empty slot looks this old to a window's first step: older than any that holds a row.
    EMPTY_AGE = 1 << 15

    @staticmethod
    def bytes_per_window(num_layers: int, lru_slots: int, max_context: int) -> int:
        """Device bytes of one window's tables."""
        return num_layers * (2 * max_context + (4 + 2) * lru_slots) + 4

    def _init_ages(self, device: str) -> None:
        shape = (self.num_layers, self.num_windows, self.lru_slots)
        self.last_used = torch.zeros(shape, dtype=torch.int16, device=device)

    def prepare_layer_swap(
        self,
        layer: int,
        topk: torch.Tensor,
        batch_windows: torch.Tensor,
        seq_lens: torch.Tensor,
        batch_rows: torch.Tensor,
        req_to_token: torch.Tensor,
        first_window_slot: int,
        queue: MissQueue,
    ) -> torch.Tensor:
        """Enter a layer's top-k into the tables and queue its misses.

        Args:
            layer: index within this rank.
            topk: ``[B, K]`` int32 positions, -1 for none, contiguous.
            batch_windows: ``[B]`` int32, -1 for padding.
            seq_lens: ``[B]`` with this step's token.
            batch_rows: ``[B]`` int32 request rows.
            req_to_token: ``[rows, >= context]`` int32 host slots.

        Returns:
            ``[B, K]`` int32 device slots.
        """
        return swap_topk(
            topk,
            batch_windows,
            batch_rows,
            seq_lens,
            self.ring_begin,
            req_to_token,
            self.offset_of_position[layer],
            self.position_at_offset[layer],
            self.last_used[layer],
            self.counters[layer],
            queue,
            self.ring_slots,
            first_window_slot,
            self.lru_slots + self.ring_slots,
        )

    def lru_post_process(self, *args) -> None:
        """Nothing is left to do: the tables were entered when the misses were queued."""

    def begin_windows(self, windows: torch.Tensor, first_positions: torch.Tensor) -> None:
        super().begin_windows(windows, first_positions)
        stamps = (first_positions + 1 - self.EMPTY_AGE).short()
        self.last_used[:, windows] = stamps[None, :, None]

    def reset_windows(self, windows: torch.Tensor) -> None:
        self.offset_of_position[:, windows] = -1
        self.position_at_offset[:, windows] = -1
        self.ring_begin[windows] = 0

    def _check_ages(self) -> None:
        """Any stamp is legal: only a step's own marks say what may not be evicted."""


class FusedSwapAdaptor(NSABackendAdaptor):
    """One layer of one decode step: tables, page table and copy of the misses.

    The copy runs on the forward's stream, so nothing waits and no list is padded.
    """

    def __init__(self, device, req_to_token_pool, sizes, lru, controller, queue: MissQueue):
        super().__init__(device, req_to_token_pool)
        self._first_window_slot = sizes.first_window_slot
        self._lru = lru
        self._controller = controller
        self._queue = queue
        compile_kernels(sizes.top_k, sizes.row_bytes)

    def adapt_for_attn_metadata(
        self,
        selected_indices: torch.Tensor,
        valid_lengths: Any,
        sparse_mask: Any,
        current_metadata: Any,
        forward_batch,
        req_to_token: torch.Tensor,
        page_size: int,
        layer_id: int,
        *,
        batch_windows: torch.Tensor,
        batch_rows: torch.Tensor,
        **kwargs,
    ) -> torch.Tensor:
        """Make a layer's top-k resident; as ``NSAOffloadBackendAdaptor``."""
        page_table = self._lru.prepare_layer_swap(
            layer_id,
            selected_indices.contiguous(),
            batch_windows,
            forward_batch.seq_lens,
            batch_rows,
            req_to_token,
            self._first_window_slot,
            self._queue,
        )
        self._controller.gather_layer(layer_id, self._queue)
        return page_table

    def commit(self, layer_id: int, batch_windows: torch.Tensor) -> None:
        """Nothing is left to do after the attention."""
        self._lru.lru_post_process(layer_id, batch_windows)
