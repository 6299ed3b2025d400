"""The plugin's entry point: hooks the trace to the coordinator and the residency tables.

``SWAP_TRACE`` names the JSON file, which is written whole at the end of each request, before its answer leaves. Hooks
only read; where the variable is unset none is registered.
"""

import dataclasses
import json
import os
from typing import Any, Dict, Optional

from swap_trace.trace import SwapTrace

OFFLOAD = "sglang.srt.mem_cache.sparsity.nsa_offload"


def activate() -> None:
    """Register the hooks; SGLang applies them in every process, and only the scheduler's meets them."""
    path = os.environ.get("SWAP_TRACE")
    if not path:
        return
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    watch = _Watch(path)
    coordinator = f"{OFFLOAD}.coordinator.NSAOffloadCoordinator"
    HookRegistry.register(f"{coordinator}.on_request_begin", watch.begun, HookType.AFTER)
    HookRegistry.register(f"{coordinator}.on_request_end", watch.ending, HookType.BEFORE)
    swap = f"{OFFLOAD}.lru_cache.LRUCacheState.prepare_layer_swap"
    HookRegistry.register(swap, watch.preparing, HookType.BEFORE)
    HookRegistry.register(swap, watch.prepared, HookType.AFTER)


class _Watch:
    """Takes what the hooks see to a `SwapTrace`; returns None, which leaves arguments and results as they are."""

    def __init__(self, path: str) -> None:
        self._path = path
        self._trace: Optional[SwapTrace] = None

    def begun(self, result, coordinator, req, first_position: int = 0) -> None:
        if self._trace is None:
            lru = coordinator.lru
            self._trace = SwapTrace(lru.num_layers, lru.num_windows, coordinator.req_to_token_pool.req_to_token.shape[1])
        window = coordinator._leases[req.req_pool_idx].window.index
        self._trace.begin(window, req.rid, first_position)

    def preparing(self, lru, layer, *args) -> None:
        self._before = lru.position_at_offset[layer].clone()

    def prepared(self, page_table, lru, layer, topk, batch_windows, *args) -> None:
        if self._trace is not None:
            self._trace.swap(layer, batch_windows, self._before, lru.position_at_offset[layer])

    def ending(self, coordinator, req) -> None:
        lease = coordinator._leases.get(req.req_pool_idx)
        if lease is None:
            return
        self._trace.end(lease.window.index)
        _write(self._path, {**_totals(coordinator), **self._summary()})

    def _summary(self) -> Dict[str, Any]:
        return {"peak_batch": self._trace.peak_batch, "requests": self._trace.requests}


def _totals(coordinator) -> Dict[str, Any]:
    """The feature's own counters and sizes."""
    sizes = coordinator.sizes
    return {
        "counters": coordinator.lru.counters.tolist(),
        "rows_stored": coordinator.controller.rows_stored,
        "sizes": {
            **dataclasses.asdict(sizes),
            "window_bytes": sizes.window_bytes,
            "bytes_per_token": sizes.bytes_per_token,
            "host_bytes_per_token": sizes.host_bytes_per_token,
            "fixed_bytes": sizes.fixed_bytes,
        },
        "host_pool_bytes": coordinator.host_pool.kv_buffer.nbytes,
    }


def _write(path: str, content: Dict[str, Any]) -> None:
    """Replace the file in one step, so that a reader sees a whole one."""
    with open(path + ".new", "w") as out:
        json.dump(content, out)
    os.replace(path + ".new", path)
