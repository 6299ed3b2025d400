"""Paged slot allocation; stands in for the two Triton kernels of ``mem_cache.allocator``.

Both are called as ``kernel[grid](...)`` and write ``out`` (int64 slots) in place. ``free`` holds free page numbers,
taken from the front; trailing arguments are Triton constants that do not matter here.
"""

import torch

from sgl_cpu_ref.patching import Launchable


@Launchable
def alloc_extend_kernel(pre, seq, last_loc, free, out, bs_upper, page_size, *args, **kwargs) -> None:
    """Slots for sequences that grow from ``pre`` to ``seq`` tokens (int [B]), one sequence after the other.

    ``last_loc`` int [B] is the slot of each sequence's last token; its page is filled up before new pages are taken.
    """
    done = taken = 0
    for before, after, last in zip(pre.tolist(), seq.tolist(), last_loc.tolist()):
        tail = min(after, -(-before // page_size) * page_size) - before
        out[done : done + tail] = torch.arange(last + 1, last + 1 + tail)
        rest = after - before - tail
        pages = -(-rest // page_size)
        if rest:
            fresh = (free[taken : taken + pages, None] * page_size + torch.arange(page_size)).flatten()
            out[done + tail : done + tail + rest] = fresh[:rest]
        done += after - before
        taken += pages


@Launchable
def alloc_decode_kernel(seq, last_loc, free, out, bs_upper, page_size, *args, **kwargs) -> None:
    """One slot for each sequence, whose new length is ``seq`` int [B]: the next of its page, or a new page's first."""
    taken = 0
    for i, (length, last) in enumerate(zip(seq.tolist(), last_loc.tolist())):
        if (length - 1) % page_size:
            out[i] = last + 1
        else:
            out[i] = free[taken] * page_size
            taken += 1
