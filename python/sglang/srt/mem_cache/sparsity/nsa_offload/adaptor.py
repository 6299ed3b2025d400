"""Fills SGLang's backend-adaptor skeleton for DSA: top-k positions in, device slots out."""

from __future__ import annotations

from typing import Any, Optional

import torch

from sglang.jit_kernel.triton.nsa_kv_offload import (
    build_gpu_page_table,
    map_seq_positions_to_host_slots,
)
from sglang.srt.mem_cache.sparsity.backend.backend_adaptor import NSABackendAdaptor
from sglang.srt.mem_cache.sparsity.nsa_offload.controller import SparseCacheController
from sglang.srt.mem_cache.sparsity.nsa_offload.lru_cache import LayerSwap, LRUCacheState
from sglang.srt.mem_cache.sparsity.nsa_offload.sizing import OffloadSizes


class NSAOffloadBackendAdaptor(NSABackendAdaptor):
    """One layer of one decode step: residency, copy of the misses, page table.

    Attributes:
        last_swap: the swap of the layer in flight; ``commit`` consumes it.
    """

    def __init__(
        self,
        device: torch.device,
        req_to_token_pool,
        sizes: OffloadSizes,
        lru: LRUCacheState,
        controller: SparseCacheController,
    ):
        super().__init__(device, req_to_token_pool)
        self._sizes = sizes
        self._lru = lru
        self._controller = controller
        self.last_swap: Optional[LayerSwap] = None

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
        """Make a layer's top-k resident.

        Args:
            selected_indices: ``[B, K]`` int32 positions, -1 for none.
            layer_id: layer within this rank.
            batch_windows: ``[B]`` int32, -1 for padding.
            batch_rows: ``[B]`` int32 request rows.

        Returns:
            ``[B, K]`` int32 device slots in the order of the positions. On the current
            stream every one of them holds its row when this returns.
        """
        topk = selected_indices.contiguous()
        swap = self._lru.prepare_layer_swap(
            layer_id, topk, batch_windows, forward_batch.seq_lens
        )
        host_slots = map_seq_positions_to_host_slots(
            swap.miss_positions, batch_rows, req_to_token
        )
        page_table, miss_slots = build_gpu_page_table(
            topk,
            batch_windows,
            swap.window_offsets,
            swap.miss_rank,
            swap.victim_offsets,
            self._sizes.first_window_slot,
            self._sizes.window_slots,
        )
        loaded = self._controller.load_layer(layer_id, host_slots, miss_slots)
        self.last_swap = swap
        self._controller.wait(loaded)
        return page_table

    def commit(self, layer_id: int, batch_windows: torch.Tensor) -> None:
        """Enter the layer's swap into the LRU, after its attention was queued."""
        self._lru.lru_post_process(layer_id, batch_windows, self.last_swap)
        self.last_swap = None
