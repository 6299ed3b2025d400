"""Transfers that may begin when nothing on this GPU writes to their slots any more."""

from __future__ import annotations

from typing import TYPE_CHECKING, Sequence

if TYPE_CHECKING:
    import torch

    from sglang.srt.disaggregation.base import KVPoll
    from sglang.srt.disaggregation.base.conn import BaseKVReceiver


class HeldTransfer:
    """Keeps a request's slots from its prefill node for as long as this GPU may write to them.

    Within the GPU streams order a slot's old and new rows; a prefill node's writes are ordered
    after nothing. So ``send_metadata``, which tells it the addresses, is kept back until the
    events are done. The transfer queue polls in each round, and each poll asks them; nobody
    waits. Each tensor-parallel rank sends when its own events are done: no decision of the
    scheduler depends on it.

    Two methods of the receiver are shadowed until then, so it stays what it is to everyone else:
    an abort that announces another destination replaces the metadata that is held.

    Args:
        receiver: of the request; its metadata has not been sent.
        events: of the last work that can write to the request's slots.
    """

    def __init__(self, receiver: "BaseKVReceiver", events: Sequence["torch.Event"]):
        self._receiver = receiver
        self._events = events
        self._metadata = None
        receiver.send_metadata = self._hold
        receiver.poll = self._poll

    def _hold(self, *args, **kwargs) -> None:
        self._metadata = args, kwargs
        self._send_if_free()

    def _poll(self) -> "KVPoll":
        """State of the transfer, which is not under way before the metadata is sent."""
        self._send_if_free()
        return type(self._receiver).poll(self._receiver)

    def _send_if_free(self) -> None:
        if self._metadata is None or not all(event.query() for event in self._events):
            return
        (args, kwargs), self._metadata = self._metadata, None
        del self._receiver.send_metadata, self._receiver.poll
        self._receiver.send_metadata(*args, **kwargs)
