"""The device pool: index keys of every token, latent KV of windows and staging only."""

from __future__ import annotations

from typing import Optional

import numpy as np
import torch

from sglang.srt.mem_cache.memory_pool import NSATokenToKVPool
from sglang.srt.mem_cache.sparsity.nsa_offload.host_pool import NSAKVOnlyTokenToKVPoolHost
from sglang.srt.mem_cache.sparsity.nsa_offload.retraction import RetractionMemory, SavedRequest
from sglang.srt.mem_cache.sparsity.nsa_offload.sizing import OffloadSizes


class NSAOffloadTokenToKVPool(NSATokenToKVPool):
    """``size`` counts logical slots; ``kv_buffer`` holds device slots, a far smaller space.

    Index keys stay addressed by logical slot. A forward writes new latent rows to
    ``write_slots``, which its ``forward_begin`` sets, in the order of ``out_cache_loc``.

    Attributes:
        kv_buffer: per layer ``[device_slots, 1, kv_cache_dim]``.
        host_pool: rows of every logical slot; set once it is allocated.
        write_slots: device slots of the tokens of the forward being run or captured.
        retraction: the host memory of retracted requests, which this pool saves.
    """

    def __init__(self, *args, sizes: OffloadSizes, **kwargs):
        self.sizes = sizes
        self.retraction = RetractionMemory(sizes.retraction_bytes)
        self.host_pool: Optional[NSAKVOnlyTokenToKVPoolHost] = None
        self.write_slots: Optional[torch.Tensor] = None
        super().__init__(*args, **kwargs)

    def _create_buffers(self):
        self.kv_buffer = [
            torch.zeros(
                (self.sizes.device_slots, 1, self.kv_cache_dim),
                dtype=self.store_dtype,
                device=self.device,
            )
            for _ in range(self.layer_num)
        ]

    def set_mla_kv_buffer(self, layer, loc, cache_k_nope, cache_k_rope):
        """Write new rows to the forward's device slots; ``loc`` holds their host slots."""
        if self.write_slots is None or self.write_slots.shape != loc.shape:
            raise RuntimeError(
                f"Latent rows of {tuple(loc.shape)} host slots have no device slots: "
                "set_mla_kv_buffer was called outside a prepared forward."
            )
        super().set_mla_kv_buffer(layer, self.write_slots, cache_k_nope, cache_k_rope)

    def set_kv_buffer(self, layer, loc, cache_k, cache_v):
        raise NotImplementedError("offloaded latent rows are written by set_mla_kv_buffer")

    def get_mla_kv_buffer(self, layer, loc, dst_dtype=None):
        raise NotImplementedError("offloaded latent rows are not addressed by host slot")

    def get_contiguous_buf_infos(self):
        """Where a prefill node writes latent rows: straight into the host pool."""
        return self.host_pool.get_contiguous_buf_infos()

    def get_contiguous_buf_memory_types(self) -> list[str]:
        """Memory type of each of these addresses, in nixl's words."""
        return ["DRAM"] * self.layer_num

    def get_cpu_copy(self, indices: torch.Tensor, mamba_indices=None) -> SavedRequest:
        """Copy a request's rows to pageable memory before its slots are freed.

        A last, partial page is the request's own, so it goes whole.

        Args:
            indices: ``[n]`` host slots in the order of positions, from position 0 on.

        Raises:
            CPUCopyRefused: memory for retracted requests is used up; nothing was copied.
        """
        num_bytes = self.sizes.saved_bytes(len(indices))
        self.retraction.check(num_bytes, len(indices))
        self._synchronize()
        pages = indices[:: self.page_size].long() // self.page_size
        saved = SavedRequest(
            torch.from_numpy(np.take(self.host_pool.pages(), pages.cpu().numpy(), axis=1)),
            [layer[pages].cpu() for layer in self.index_k_with_scale_buffer],
        )
        self.retraction.count(saved, num_bytes)
        return saved

    def load_cpu_copy(self, saved: SavedRequest, indices: torch.Tensor, mamba_indices=None):
        """Write back what ``get_cpu_copy`` saved, to the slots the request owns now."""
        self._synchronize()
        pages = indices[:: self.page_size].long() // self.page_size
        self.host_pool.pages()[:, pages.cpu().numpy()] = saved.rows.numpy()
        for layer, keys in zip(self.index_k_with_scale_buffer, saved.index_keys):
            layer[pages] = keys.to(layer.device)
        self._synchronize()

    def _synchronize(self) -> None:
        """Wait for copies to and from the host pool: it is read by the CPU next."""
        torch.get_device_module(self.device).synchronize()
