"""Prefill staging: device rows that hold a prompt while it is being prefilled.

Attention over a chunk reads every earlier chunk of its prompt, so a prompt stays on the device
until its last chunk has run. Rows are kept in pages that mirror host pages: a device slot is
found from a host slot through one table. Page 0 of both spaces is padding and maps to itself.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

from sglang.srt.mem_cache.sparsity.nsa_offload.sizing import OffloadSizes
from sglang.srt.mem_cache.sparsity.nsa_offload.uploads import upload


class _Assignment(NamedTuple):
    row: int
    first_page: int
    staging_pages: list[int]


class PrefillStaging:
    """Owns the staging pages of the prompts in prefill and the table from host to staging page.

    The scheduler thread calls ``stage``, ``recycle`` and ``release``, which only change lists.
    ``apply_pending`` runs at the start of the next forward, on its stream, and changes the
    table: so a page is overwritten only by a forward that comes after its last reader.

    Args:
        sizes: counts of this rank.
        num_host_pages: pages of the logical space, without the padding page.
        device: of the table.
    """

    def __init__(self, sizes: OffloadSizes, num_host_pages: int, device: str):
        self.page_size = sizes.page_size
        first = sizes.first_staging_slot // self.page_size
        self.num_pages = sizes.staging_slots // self.page_size
        self._free = list(range(first + self.num_pages - 1, first - 1, -1))
        self._pages_of_row: dict[int, list[int]] = {}
        self._finished_rows: list[int] = []
        self._assignments: list[_Assignment] = []
        self._released: list[int] = []
        # Device page of each host page; 0, the padding page, where none is staged.
        self.device_page_of_host_page = torch.zeros(
            (num_host_pages + 1,), dtype=torch.int32, device=device
        )
        self._host_page_of_device_page = torch.zeros(
            (first + self.num_pages,), dtype=torch.int64, device=device
        )

    @property
    def num_free(self) -> int:
        return len(self._free)

    def recycle(self) -> None:
        """Free the pages of prompts whose last chunk was launched before this call."""
        finished, self._finished_rows = self._finished_rows, []
        for row in finished:
            self.release(row)

    def stage(self, row: int, prefix_len: int, seq_len: int, is_last_chunk: bool) -> None:
        """Give a chunk the pages it writes.

        Args:
            row: request row.
            prefix_len: tokens of earlier chunks, all staged by this row.
            seq_len: tokens with this chunk.
            is_last_chunk: the row's pages are free once this batch has been launched.

        Raises:
            RuntimeError: the prefix is not staged, or the area is exhausted; it is sized so
                that neither can happen.
        """
        pages = self._pages_of_row.setdefault(row, [])
        if prefix_len > len(pages) * self.page_size:
            raise RuntimeError(
                f"Request row {row} has a prefix of {prefix_len} tokens, but only "
                f"{len(pages) * self.page_size} are staged on the device."
            )
        needed = -(-seq_len // self.page_size) - len(pages)
        if needed > len(self._free):
            raise RuntimeError(
                f"Prefill staging is exhausted: {needed} pages needed, {len(self._free)} of "
                f"{self.num_pages} free."
            )
        if needed > 0:
            taken = [self._free.pop() for _ in range(needed)]
            self._assignments.append(_Assignment(row, len(pages), taken))
            pages.extend(taken)
        if is_last_chunk:
            self._finished_rows.append(row)

    def release(self, row: int) -> None:
        """Free a row's pages; no effect if it owns none."""
        pages = self._pages_of_row.pop(row, [])
        self._free.extend(pages)
        self._released.extend(pages)
        if row in self._finished_rows:
            self._finished_rows.remove(row)
        self._assignments = [a for a in self._assignments if a.row != row]

    def apply_pending(self, req_to_token: torch.Tensor) -> None:
        """Bring the table up to date, on the current stream. Releases come first."""
        device = self.device_page_of_host_page.device
        if self._released:
            released = upload(self._released, device)
            host_pages = self._host_page_of_device_page[released]
            self.device_page_of_host_page.index_fill_(0, host_pages, 0)
            self._host_page_of_device_page.index_fill_(0, released, 0)
            self._released = []
        if self._assignments:
            rows, positions, staging_pages = [], [], []
            for row, first_page, taken in self._assignments:
                rows += [row] * len(taken)
                positions += [(first_page + i) * self.page_size for i in range(len(taken))]
                staging_pages += taken
            rows, positions, staging_pages = upload([rows, positions, staging_pages], device)
            host_pages = req_to_token[rows, positions].long() // self.page_size
            self.device_page_of_host_page[host_pages] = staging_pages.int()
            self._host_page_of_device_page[staging_pages] = host_pages
            self._assignments = []

    def device_slots(self, host_slots: torch.Tensor) -> torch.Tensor:
        """Device slots of staged host slots, same shape and dtype; padding stays padding."""
        pages = self.device_page_of_host_page[(host_slots // self.page_size).long()]
        slots = pages * self.page_size + host_slots % self.page_size
        return slots.to(host_slots.dtype)
