"""Transfers that may begin when nothing on this GPU writes to their slots any more."""

from __future__ import annotations

from typing import TYPE_CHECKING, Sequence

if TYPE_CHECKING:
    import torch

    from sglang.srt.disaggregation.base import KVPoll
    from sglang.srt.disaggregation.decode import DecodeRequest


class HeldReceiver:
    """Takes the place of a request's receiver until the prefill node may learn of its slots.

    Within the GPU streams order a slot's old and new rows; a prefill node's writes are ordered
    after nothing. So ``send_metadata``, which tells it the addresses, is kept back until the
    events are done. The transfer queue polls in each round, and each poll asks them; nobody
    waits. Once the metadata is sent the request has its own receiver again.

    Each tensor-parallel rank sends when its own events are done: no decision of the scheduler
    depends on it.

    Args:
        decode_req: has its receiver, and gets this one.
        events: of the last work that can write to the request's slots.
    """

    def __init__(self, decode_req: "DecodeRequest", events: Sequence["torch.Event"]):
        self._decode_req = decode_req
        self._receiver = decode_req.kv_receiver
        self._events = events
        self._metadata = None
        decode_req.kv_receiver = self

    def send_metadata(self, *args, **kwargs) -> None:
        """As the receiver's own, but later: here or in a poll."""
        self._metadata = args, kwargs
        self._send_if_free()

    def poll(self) -> "KVPoll":
        """State of the transfer, which is not under way before the metadata is sent."""
        self._send_if_free()
        return self._receiver.poll()

    def __getattr__(self, name: str):
        return getattr(self._receiver, name)

    def _send_if_free(self) -> None:
        if self._metadata is None or not all(event.query() for event in self._events):
            return
        args, kwargs = self._metadata
        self._metadata = None
        if self._decode_req.kv_receiver is self:
            self._decode_req.kv_receiver = self._receiver
        self._receiver.send_metadata(*args, **kwargs)
