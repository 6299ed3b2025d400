"""DSA attention over device windows, for ``--enable-decode-nsa-kv-offload``."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from functools import partial
from typing import TYPE_CHECKING, Callable, Optional

import torch

from sglang.srt.layers.attention.nsa_backend import (
    NativeSparseAttnBackend,
    NSAIndexerMetadata,
)
from sglang.srt.mem_cache.sparsity.nsa_offload.step_inputs import is_decode_step

if TYPE_CHECKING:
    from sglang.srt.layers.radix_attention import RadixAttention
    from sglang.srt.model_executor.forward_batch_info import ForwardBatch
    from sglang.srt.model_executor.model_runner import ModelRunner


@dataclass(frozen=True)
class NSAOffloadIndexerMetadata(NSAIndexerMetadata):
    """Of decode: begins a layer's swap as soon as its top-k is there."""

    swap_begin: Callable[[torch.Tensor], None] = field(kw_only=True)

    def topk_transform(self, *args, **kwargs) -> torch.Tensor:
        topk = super().topk_transform(*args, **kwargs)
        self.swap_begin(topk)
        return topk


class NSAOffloadAttnBackend(NativeSparseAttnBackend):
    """The base backend, given page tables of device slots.

    Decode, and a verify step, which the base runs as an extend, ask for unfused top-k
    (positions), begin to make them resident at once, and hand the base their device slots in
    place of its fused top-k. New rows are written while the others still come. Prefill keeps the
    fused top-k and swaps the page table it reads for one of staging slots. Attention kernels are
    the base's own.
    """

    # Set by the CUDA graph runner around a replay; None otherwise.
    _replay_forward_batch: Optional["ForwardBatch"] = None

    def __init__(self, model_runner: "ModelRunner"):
        super().__init__(model_runner)
        self.coordinator = model_runner.req_to_token_pool.sparse_coordinator

    def init_forward_metadata(self, forward_batch: "ForwardBatch"):
        self.coordinator.forward_begin(forward_batch)
        super().init_forward_metadata(forward_batch)
        # An idle rank's padding runs the indexer, and no attention.
        if is_decode_step(forward_batch.forward_mode) or forward_batch.forward_mode.is_idle():
            return
        staged = self.coordinator.staging.device_slots
        metadata = self.forward_metadata
        flattened = metadata.page_table_1_flattened
        # real_page_table addresses index keys and stays in host slots.
        self.forward_metadata = replace(
            metadata,
            page_table_1=staged(metadata.page_table_1),
            page_table_1_flattened=None if flattened is None else staged(flattened),
        )

    def init_cuda_graph_state(self, max_bs: int, max_num_tokens: int):
        super().init_cuda_graph_state(max_bs, max_num_tokens)
        self.coordinator.inputs.reserve(max_bs)

    def init_forward_metadata_capture_cuda_graph(
        self, bs, num_tokens, req_pool_indices, seq_lens, encoder_lens, forward_mode, spec_info
    ):
        self.coordinator.padding_begin(bs, forward_mode)
        super().init_forward_metadata_capture_cuda_graph(
            bs, num_tokens, req_pool_indices, seq_lens, encoder_lens, forward_mode, spec_info
        )

    def init_forward_metadata_replay_cuda_graph(
        self,
        bs,
        req_pool_indices,
        seq_lens,
        seq_lens_sum,
        encoder_lens,
        forward_mode,
        *args,
        **kwargs,
    ):
        # Padded rows carry the request rows of an older batch, so only the real ones count.
        num_real = self._replay_forward_batch.batch_size
        self.coordinator.decode_begin(bs, num_real, req_pool_indices, seq_lens, forward_mode)
        super().init_forward_metadata_replay_cuda_graph(
            bs,
            req_pool_indices,
            seq_lens,
            seq_lens_sum,
            encoder_lens,
            forward_mode,
            *args,
            **kwargs,
        )

    def set_nsa_prefill_impl(self, forward_batch: Optional["ForwardBatch"] = None):
        super().set_nsa_prefill_impl(forward_batch)
        if self.use_mha and any(forward_batch.extend_prefix_lens_cpu):
            # Dense attention over a prefix reads the pool by host slot.
            self.use_mha = False

    def get_indexer_metadata(
        self, layer_id: int, forward_batch: "ForwardBatch"
    ) -> NSAIndexerMetadata:
        metadata = super().get_indexer_metadata(layer_id, forward_batch)
        if not is_decode_step(forward_batch.forward_mode):
            return metadata
        swap_begin = partial(self.coordinator.swap_begin, layer_id)
        fields = {**vars(metadata), "force_unfused_topk": True}
        return NSAOffloadIndexerMetadata(**fields, swap_begin=swap_begin)

    def forward_decode(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        layer: "RadixAttention",
        forward_batch: "ForwardBatch",
        save_kv_cache: bool = True,
        *,
        topk_indices: Optional[torch.Tensor] = None,
        **kwargs,
    ) -> torch.Tensor:
        page_table = self._rows_of_topk(
            q, k, v, layer, forward_batch, save_kv_cache, topk_indices, **kwargs
        )
        return super().forward_decode(
            q, k, v, layer, forward_batch, False, topk_indices=page_table, **kwargs
        )

    def forward_extend(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        layer: "RadixAttention",
        forward_batch: "ForwardBatch",
        save_kv_cache: bool = True,
        *,
        topk_indices: Optional[torch.Tensor] = None,
        **kwargs,
    ) -> torch.Tensor:
        if is_decode_step(forward_batch.forward_mode):
            topk_indices = self._rows_of_topk(
                q, k, v, layer, forward_batch, save_kv_cache, topk_indices, **kwargs
            )
            save_kv_cache = False
        output = super().forward_extend(
            q, k, v, layer, forward_batch, save_kv_cache, topk_indices=topk_indices, **kwargs
        )
        self.coordinator.attention_end(output, layer, forward_batch)
        return output

    def _rows_of_topk(
        self, q, k, v, layer, forward_batch, save_kv_cache, topk_indices, k_rope=None, **kwargs
    ) -> torch.Tensor:
        """Write the step's new rows, wait for the others; ``[B * Q, K]`` int32 device slots."""
        if save_kv_cache and k is not None:
            slots = forward_batch.out_cache_loc
            self.coordinator.pad_write_slots(len(slots))
            forward_batch.token_to_kv_pool.set_mla_kv_buffer(layer, slots, k, k_rope)
        return self.coordinator.attention_begin(
            q, k, v, layer, forward_batch, self.forward_metadata, topk_indices=topk_indices
        )
