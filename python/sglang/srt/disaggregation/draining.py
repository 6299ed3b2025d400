"""Transfers of aborted requests: their slots stay taken until nothing can be written to them."""

from __future__ import annotations

import time
from typing import Optional

import numpy as np

from sglang.srt.disaggregation.base import KVPoll

# From the notice to the prefill node until its last write, which had begun before it read the
# notice. Long enough for one chunk of a prompt over a slow link.
DRAIN_SECONDS = 10.0


class DrainingReceiver:
    """Takes the place of an aborted request's receiver in the transfer queue.

    Polls ``Failed`` once the transfer has ended on the prefill node, in whatever way, or
    ``DRAIN_SECONDS`` after that node was told to send nothing. Until then ``Transferring``:
    the request keeps its slots and its metadata buffer.
    """

    require_staging = False

    def __init__(self, receiver) -> None:
        self._receiver = receiver
        self._end = time.monotonic() + DRAIN_SECONDS
        self._withdraw_destination()

    def poll(self) -> KVPoll:
        ended = self._receiver.poll() in (KVPoll.Success, KVPoll.Failed)
        return KVPoll.Failed if ended or time.monotonic() >= self._end else KVPoll.Transferring

    def abort(self) -> None:
        """It is aborted already."""

    def failure_exception(self) -> None:
        """Forget the transfer and raise why it failed, as receivers do."""
        self._receiver.abort()
        self._receiver.failure_exception()

    def _withdraw_destination(self) -> None:
        """Announce the request once more, as to a prefill rank that has nothing to send.

        Every prefill node understands that: nothing new in the protocol.
        """
        infos: Optional[list] = getattr(self._receiver, "bootstrap_infos", None)
        if not infos:
            return
        self._receiver.bootstrap_infos = [{**info, "is_dummy": True} for info in infos]
        self._receiver.send_metadata(np.empty(0, dtype=np.int32), aux_index=0)
