"""Copies of latent rows between the device windows and the host pool, and their order."""

from __future__ import annotations

from collections import deque
from contextlib import AbstractContextManager
from typing import Optional

import torch

from sglang.jit_kernel.nsa_kv_offload import MissQueue, gather_misses, store_rows
from sglang.srt.mem_cache.sparsity.nsa_offload.device_pool import NSAOffloadTokenToKVPool
from sglang.srt.mem_cache.sparsity.nsa_offload.host_pool import NSAKVOnlyTokenToKVPoolHost


# Copies to the host whose end is not known yet; older ones are covered by newer ones.
MAX_OPEN_COPIES = 64


class SparseCacheController:
    """Moves single tokens; owns both streams beside the forward's, every event and every wait.

    Order:

    * host to device: ``load_layer`` runs on the load stream, which ``load_begin`` orders behind
      the top-k it belongs to; ``load_end`` orders it before the attention that needs the rows;
    * device to host: ``store_layer`` (prefill) and ``write_back`` (decode) run on the store
      stream, after what the calling stream has queued so far; ``forward_begin`` orders all of
      them before whatever the forward stream does next.

    On a CPU device streams do nothing and every copy is done on return.
    """

    def __init__(
        self, device_pool: NSAOffloadTokenToKVPool, host_pool: NSAKVOnlyTokenToKVPoolHost
    ):
        self._device_kv = device_pool.kv_buffer
        self._host_kv = host_pool.kv_buffer
        # Device and host addresses of all layers, and of each: made once, since a prefill asks in
        # every layer.
        self._ptrs = device_pool.data_ptrs, host_pool.layer_ptrs
        self._ptrs_of_layer = list(zip(*(ptrs.split(1) for ptrs in self._ptrs)))
        self._row_bytes = host_pool.row_bytes
        self._module = torch.get_device_module(device_pool.device)
        self._on_gpu = torch.device(device_pool.device).type != "cpu"
        self._load_stream = self._module.Stream()
        self._store_stream = self._module.Stream()
        self._forward_stream = None
        self._stored: Optional[torch.Event] = None
        # Rows sent to the host; the host's own counts, so reading them costs nothing.
        self.rows_stored = 0
        self._rows_arrived = 0
        # (rows_stored at the copy, its event), oldest first.
        self._open_copies: deque[tuple[int, torch.Event]] = deque(maxlen=MAX_OPEN_COPIES)

    def load_begin(self) -> AbstractContextManager:
        """Enter the load stream behind the current one.

        What is read or written there must have been allocated before, and be kept until
        ``load_end``: ``record_stream`` would keep its memory from all later layers of a
        captured graph.
        """
        self._load_stream.wait_stream(self._module.current_stream())
        return self._module.stream(self._load_stream)

    def load_end(self) -> None:
        """Order all that was queued on the load stream before what the current one does next."""
        self._module.current_stream().wait_stream(self._load_stream)

    def load_layer(self, layer: int, queue: MissQueue) -> None:
        """Copy the queued rows of one layer from the host, on the current stream.

        Args:
            layer: index within this rank.
            queue: as ``swap_topk`` filled it.
        """
        gather_misses(self._rows(self._host_kv[layer]), self._rows(self._device_kv[layer]), queue)

    def store_layer(
        self, layer: int, device_slots: torch.Tensor, host_slots: torch.Tensor
    ) -> None:
        """Copy rows of one layer to the host: prompt rows, from inside the prefill forward.

        Args:
            layer: index within this rank.
            device_slots: ``[n]`` int64 staging slots.
            host_slots: ``[n]`` int64.
        """
        self._store(self._ptrs_of_layer[layer], device_slots, host_slots)
        if layer == 0:
            self.rows_stored += host_slots.numel()
        self._note_copy()

    def write_back(self, device_slots: torch.Tensor, host_slots: torch.Tensor) -> None:
        """Copy rows of all layers to the host: the new rows of a decode step.

        Args:
            device_slots: ``[n]`` int64 ring slots.
            host_slots: ``[n]`` int64.
        """
        if not host_slots.numel():
            return
        self._store(self._ptrs, device_slots, host_slots)
        self.rows_stored += host_slots.numel()
        self._note_copy()

    def rows_arrived(self) -> int:
        """Rows of ``rows_stored`` known to be on the host; asks events and does not block."""
        while self._open_copies and self._open_copies[0][1].query():
            self._rows_arrived = self._open_copies.popleft()[0]
        return self._rows_arrived

    def copy_after_forward(self, target: torch.Tensor, source: torch.Tensor) -> torch.Event:
        """Queue a small copy to pinned memory after the forwards launched so far.

        Returns:
            The event behind it: until it is done ``target`` belongs to the copy.
        """
        stream = self._forward_stream or self._module.current_stream()
        with self._module.stream(stream):
            target.copy_(source, non_blocking=True)
            return self._record(stream)

    def forward_begin(self) -> None:
        """Order every copy to the host issued so far before the forward about to be queued.

        The current stream is the forward's; it is remembered for ``wait_for_forward``.
        """
        self._forward_stream = self._module.current_stream()
        if self._stored is not None:
            self._forward_stream.wait_event(self._stored)

    def wait_for_forward(self) -> None:
        """Order the copies to the host issued next after every forward launched so far."""
        if self._forward_stream is not None:
            self._store_stream.wait_stream(self._forward_stream)

    def writes_in_flight(self, forwards: bool) -> list[torch.Event]:
        """Events behind the copies to the host issued so far, without those that are done.

        Args:
            forwards: and behind every forward launched so far.
        """
        events = [] if self._stored is None else [self._stored]
        if forwards and self._forward_stream is not None:
            events.append(self._record(self._forward_stream))
        return [event for event in events if not event.query()]

    def synchronize(self, forwards: bool = False) -> None:
        """Block until every copy to the host is done; for idle moments and CPU readers.

        Args:
            forwards: and every forward launched so far.
        """
        if self._stored is not None:
            self._stored.synchronize()
        if forwards and self._forward_stream is not None:
            self._forward_stream.synchronize()

    def _store(
        self,
        ptrs: tuple[torch.Tensor, torch.Tensor],
        device_slots: torch.Tensor,
        host_slots: torch.Tensor,
    ) -> None:
        with self._after_current(self._store_stream, device_slots, host_slots):
            store_rows(*ptrs, device_slots, host_slots, self._row_bytes)
            self._stored = self._record(self._store_stream)

    def _rows(self, layer_kv: torch.Tensor) -> torch.Tensor:
        return layer_kv.view(torch.uint8).view(-1, self._row_bytes)

    def _after_current(self, stream, *inputs: torch.Tensor) -> AbstractContextManager:
        """Enter ``stream`` behind the current one; keep the inputs alive for it."""
        stream.wait_stream(self._module.current_stream())
        if self._on_gpu:
            for tensor in inputs:
                tensor.record_stream(stream)
        return self._module.stream(stream)

    def _record(self, stream) -> torch.Event:
        event = self._module.Event()
        event.record(stream)
        return event

    def _note_copy(self) -> None:
        """Remember the newest event of ``rows_stored``: a prompt's rows end with its last layer."""
        if self._open_copies and self._open_copies[-1][0] == self.rows_stored:
            self._open_copies.pop()
        self._open_copies.append((self.rows_stored, self._stored))
