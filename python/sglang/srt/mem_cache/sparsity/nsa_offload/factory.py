"""Builds the parts of decode KV offloading for a model runner."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

import torch

from sglang.srt.layers.dp_attention import get_attention_tp_size
from sglang.srt.mem_cache.sparsity.nsa_offload.config import (
    CONFIG_FLAG,
    NSAKVOffloadConfig,
    registers_host_memory,
)
from sglang.srt.mem_cache.sparsity.nsa_offload.coordinator import NSAOffloadCoordinator
from sglang.srt.mem_cache.sparsity.nsa_offload.host_memory import memory_for
from sglang.srt.mem_cache.sparsity.nsa_offload.host_pool import NSAKVOnlyTokenToKVPoolHost

if TYPE_CHECKING:
    from sglang.srt.model_executor.model_runner import ModelRunner

logger = logging.getLogger(__name__)


def attach_nsa_kv_offload(model_runner: "ModelRunner") -> None:
    """Allocate the host pool and hang the coordinator on the runner's request row pool.

    The runner's pools exist and its ``token_to_kv_pool`` is a ``NSAOffloadTokenToKVPool``.
    Every hook finds the coordinator through the row pool, so it lives as long as the rows.
    """
    device_pool = model_runner.token_to_kv_pool
    sizes = device_pool.sizes
    server_args = model_runner.server_args
    memory = memory_for(
        torch.device(device_pool.device),
        NSAKVOnlyTokenToKVPoolHost.rows_for(device_pool.size, sizes.page_size)
        * sizes.host_bytes_per_token,
        registers_host_memory(server_args),
        NSAKVOffloadConfig.from_server_args(server_args).host_memory,
    )
    host_pool = NSAKVOnlyTokenToKVPoolHost(
        device_pool, memory, show_progress=model_runner.tp_rank == 0
    )
    device_pool.host_pool = host_pool
    model_runner.req_to_token_pool.sparse_coordinator = NSAOffloadCoordinator(
        sizes,
        model_runner.req_to_token_pool,
        device_pool,
        host_pool,
        keep_finished_rows=not server_args.disable_radix_cache,
        # Tokens of an eager batch are padded to a multiple of the attention ranks.
        batch_padding=get_attention_tp_size() - 1,
    )
    longest = min(device_pool.size, model_runner.model_config.context_len)
    saved_gb = sizes.saved_bytes(longest) / 1e9
    if server_args.disaggregation_mode == "decode" and sizes.retraction_bytes / 1e9 < saved_gb:
        logger.warning(
            "%s: retract_size_gb is below the %.6f GB that a request of %d tokens takes; one "
            "that is retracted for lack of memory ends with an error.",
            CONFIG_FLAG,
            saved_gb,
            longest,
        )
    logger.info(
        "Decode KV offloading: %d tokens, %d windows of %d slots, %d staging slots; "
        "%.2f GB on the device, %.2f GB on the host (%s), %.2f GB for retracted requests.",
        device_pool.size,
        sizes.num_windows,
        sizes.window_slots,
        sizes.staging_slots,
        sizes.device_bytes(device_pool.size) / 1e9,
        host_pool.size * host_pool.size_per_token / 1e9,
        memory,
        sizes.retraction_bytes / 1e9,
    )
