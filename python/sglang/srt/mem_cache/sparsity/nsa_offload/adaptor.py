"""Fills SGLang's backend-adaptor skeleton for DSA: top-k positions in, device slots out."""

from __future__ import annotations

from typing import Any, Optional

import torch

from sglang.jit_kernel.nsa_kv_offload import MissQueue, compile_kernels
from sglang.srt.mem_cache.sparsity.backend.backend_adaptor import NSABackendAdaptor
from sglang.srt.mem_cache.sparsity.nsa_offload.controller import SparseCacheController
from sglang.srt.mem_cache.sparsity.nsa_offload.lru_cache import LRUCacheState
from sglang.srt.mem_cache.sparsity.nsa_offload.sizing import OffloadSizes


class NSAOffloadBackendAdaptor(NSABackendAdaptor):
    """One layer of one decode step: tables, page table and copy of the misses.

    Two launches on the current stream.

    Args:
        queue: of misses; all layers share it.
    """

    def __init__(
        self,
        device: torch.device,
        req_to_token_pool,
        sizes: OffloadSizes,
        lru: LRUCacheState,
        controller: SparseCacheController,
        queue: MissQueue,
    ):
        super().__init__(device, req_to_token_pool)
        self._first_window_slot = sizes.first_window_slot
        self._lru = lru
        self._controller = controller
        self._queue = queue
        compile_kernels(sizes.swap_entries, sizes.row_bytes)

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
        request_rows: torch.Tensor,
        batch_lens: torch.Tensor,
        queries: int,
        out: Optional[torch.Tensor] = None,
        **kwargs,
    ) -> torch.Tensor:
        """Make a layer's top-k resident, for all queries of a request at once.

        Args:
            selected_indices: ``[B * Q, K]`` int32 positions, -1 for none.
            layer_id: layer within this rank.
            batch_windows: ``[B]`` int32, -1 for padding.
            request_rows: ``[B]`` int32 request rows.
            batch_lens: ``[B]`` int32 lengths with this step's tokens.
            queries: Q, of one request.
            out: ``[B * Q, K]`` int32, contiguous; what is returned, allocated if unset.

        Returns:
            ``[B * Q, K]`` int32 device slots in the order of the positions. On the current
            stream every one of them holds its row when this returns.
        """
        entries = queries * selected_indices.shape[1]
        page_table = self._lru.prepare_layer_swap(
            layer_id,
            selected_indices.reshape(-1, entries),
            batch_windows,
            batch_lens,
            request_rows,
            req_to_token,
            self._first_window_slot,
            self._queue,
            queries,
            None if out is None else out.view(-1, entries),
        )
        self._controller.load_layer(layer_id, self._queue)
        return page_table.view_as(selected_indices)
