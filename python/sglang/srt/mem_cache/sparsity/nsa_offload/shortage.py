"""Which resource queued requests wait for."""

from __future__ import annotations

from typing import TYPE_CHECKING

from sglang.srt.mem_cache.sparsity.nsa_offload.sizing import (
    DEVICE_MEMORY,
    HOST_MEMORY,
    MAX_TOTAL_TOKENS,
)

if TYPE_CHECKING:
    from sglang.srt.managers.scheduler import Scheduler

# What else runs out than the logical slots, which end for the reason that limited their number.
WINDOW = "window"
REQUEST_ROW = "request_row"
METADATA_BUFFER = "metadata_buffer"
NOTHING = "nothing"
RESOURCES = (
    WINDOW,
    HOST_MEMORY,
    DEVICE_MEMORY,
    MAX_TOTAL_TOKENS,
    REQUEST_ROW,
    METADATA_BUFFER,
    NOTHING,
)


def queued_requests(scheduler: "Scheduler", slot_limit: str) -> dict[str, int]:
    """Count the queued requests by what they lack; reads CPU state only.

    It repeats no admission rule of the scheduler, but looks at what its last round left
    behind, so a request that has just come counts as lacking ``nothing``.

    Args:
        scheduler: of a colocated server or of a decode node.
        slot_limit: the resource that limits logical slots, one of ``RESOURCES``.

    Returns:
        A count for each of ``RESOURCES``.
    """
    counts = dict.fromkeys(RESOURCES, 0)
    prealloc = getattr(scheduler, "disagg_decode_prealloc_queue", None)
    if prealloc is None:
        counts[_lack_of_prompts(scheduler, slot_limit)] += len(scheduler.waiting_queue)
        return counts
    # On a decode node these have their slots already.
    counts[WINDOW if _windows_are_taken(scheduler) else NOTHING] += len(scheduler.waiting_queue)
    counts[slot_limit] += len(prealloc.retracted_queue)
    ready = sum(entry.waiting_for_input for entry in prealloc.queue)
    counts[_lack_of_preallocation(prealloc, slot_limit)] += ready
    counts[NOTHING] += len(prealloc.queue) - ready
    return counts


def _windows_are_taken(scheduler: "Scheduler") -> bool:
    return len(scheduler.running_batch.reqs) >= scheduler.max_running_requests


def _lack_of_prompts(scheduler: "Scheduler", slot_limit: str) -> str:
    # A colocated server has as many request rows as windows, and prompts in prefill hold rows.
    if scheduler.req_to_token_pool.available_size() <= 0 or _windows_are_taken(scheduler):
        return WINDOW
    # Set where the last prefill attempt found no slots.
    return slot_limit if scheduler.running_batch.batch_is_full else NOTHING


def _lack_of_preallocation(prealloc, slot_limit: str) -> str:
    """Why requests that could be preallocated were not: the tests of its loop, in their order."""
    if prealloc.req_to_token_pool.available_size() <= 0:
        return REQUEST_ROW
    if prealloc.req_to_metadata_buffer_idx_allocator.available_size() <= 0:
        return METADATA_BUFFER
    return slot_limit
