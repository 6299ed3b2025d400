"""Requests of a decode node that end while their KV is transferred: their slots stay taken until nothing can write to them.

A prefill node has the addresses of a request's pages from the announcement (``send_metadata``) on, and hears of nothing that
happens to the request on the decode node. So whatever ends the request there, an abort, a timeout, another rank's
failure or the death of the prefill node, answers its client at once and leaves it in the transfer queue, until each rank knows
that its own transfer has ended.
"""

from __future__ import annotations

import itertools
import logging
import time
from http import HTTPStatus
from typing import TYPE_CHECKING, List, NamedTuple, Optional

import numpy as np

from sglang.srt.disaggregation.base import KVPoll
from sglang.srt.disaggregation.base.conn import StateType
from sglang.srt.disaggregation.common.conn import CommonKVReceiver
from sglang.srt.disaggregation.mooncake.conn import MooncakeKVReceiver
from sglang.srt.disaggregation.nixl.conn import NixlKVReceiver
from sglang.srt.disaggregation.utils import prepare_abort

if TYPE_CHECKING:
    from sglang.srt.disaggregation.decode import DecodeRequest, DecodeTransferQueue

logger = logging.getLogger(__name__)

# The last resort, where no answer comes: from the withdrawal, or from the failure, until the last write, which had begun
# before. Long enough for one chunk of a prompt over a slow link.
DRAIN_SECONDS = 10.0


class Announcement(NamedTuple):
    """What the prefill node was told of a request's destination.

    Attributes:
        number: its place among all announcements and withdrawals of this rank.
        page_indices: int32 [pages] of latent KV.
        state_indices: int32 [pages] of each of the pool's state types.
        prefix_len: tokens that the decode node had already.
    """

    number: int
    page_indices: np.ndarray
    state_indices: List[np.ndarray]
    prefix_len: int


class Draining:
    """The part of a transfer queue that deals with requests which have ended.

    The ranks of an attention-TP group take every step together, since each rests on what all have seen: a drain begins with
    an abort, which all receive, or with a reduced poll of ``Failed``, and ends with a reduced poll of ``Success``.
    The reduction takes the minimum, and ``Failed`` is 0: a rank that drains never polls ``Failed``.
    """

    def __init__(self, queue: DecodeTransferQueue) -> None:
        self._queue = queue
        self._numbers = itertools.count()
        self._unread_buffer: Optional[int] = None

    def announced(self, decode_req: DecodeRequest, page_indices, state_indices, prefix_len: int) -> None:
        """Note what the prefill node has just been told."""
        decode_req.announcement = Announcement(next(self._numbers), page_indices, state_indices, prefix_len)

    def abort(self, decode_req: DecodeRequest) -> None:
        """A client has gone."""
        if not isinstance(decode_req.kv_receiver, DrainingReceiver):
            self._begin(decode_req, "Aborted in transfer by AbortReq.", redirect=True)

    def decide(self, decode_req: DecodeRequest, poll: KVPoll) -> KVPoll:
        """What the queue does with a request, by the poll of all ranks: ``Failed`` frees its slots."""
        if isinstance(decode_req.kv_receiver, DrainingReceiver):
            return KVPoll.Failed if poll == KVPoll.Success else KVPoll.Transferring
        if poll == KVPoll.Failed:
            message = f"Decode transfer failed for request rank={self._queue.tp_rank} {decode_req.req.rid=} "
            message += f"{decode_req.req.bootstrap_room=}: {_failure(decode_req.kv_receiver)}"
            logger.error(message)
            self._begin(decode_req, message, redirect=False)
            return KVPoll.Transferring
        if poll == KVPoll.Success:
            self._end_those_before(decode_req)
        return poll

    def _begin(self, decode_req: DecodeRequest, message: str, redirect: bool) -> None:
        receiver = decode_req.kv_receiver
        _wait_on_after_timeout(receiver)
        withdrawn = None
        # Not where it has ended: a prefill node keeps what it is told of a room that it has forgotten for ever.
        if receiver.poll() not in (KVPoll.Success, KVPoll.Failed):
            self._withdraw(decode_req, redirect)
            withdrawn = next(self._numbers)
        decode_req.kv_receiver = DrainingReceiver(receiver, withdrawn)
        prepare_abort(decode_req.req, message, status_code=HTTPStatus.INTERNAL_SERVER_ERROR)
        self._queue.scheduler.stream_output([decode_req.req], decode_req.req.return_logprob)

    def _withdraw(self, decode_req: DecodeRequest, redirect: bool) -> None:
        """Announce the request once more, with another destination: nothing new in the protocol.

        Redirected, it goes to page 0, which no request ever owns, and to a metadata buffer that nobody reads: the
        transfer ends as any other, with an answer. Otherwise the prefill node is told to send nothing, as to a rank without
        work, which neither ends with an answer nor brings a failed room back to life.
        """
        receiver, announced = decode_req.kv_receiver, decode_req.announcement
        if not getattr(receiver, "bootstrap_infos", None):
            return
        buffer = self._take_unread_buffer() if redirect and _page_0_is_free(receiver) else None
        if buffer is None:
            receiver.bootstrap_infos = [{**info, "is_dummy": True} for info in receiver.bootstrap_infos]
            receiver.required_dst_info_num = 0
            receiver.send_metadata(np.empty(0, dtype=np.int32), aux_index=0)
            return
        if isinstance(receiver, NixlKVReceiver):
            # Of a request that a nixl prefill node has aborted and not yet ended, a full announcement undoes the abort.
            # This number keeps it from being full; nixl has no other use for it, and mooncake counts answers by it.
            receiver.required_dst_info_num = 0
        receiver.send_metadata(
            np.zeros_like(announced.page_indices),
            buffer,
            [np.zeros_like(indices) for indices in announced.state_indices],
            decode_prefix_len=announced.prefix_len,
        )

    def _take_unread_buffer(self) -> Optional[int]:
        """One metadata buffer is kept for all redirected transfers, from the first on. (There are two for each request.)"""
        if self._unread_buffer is None:
            self._unread_buffer = self._queue.req_to_metadata_buffer_idx_allocator.alloc()
        return self._unread_buffer

    def _end_those_before(self, decode_req: DecodeRequest) -> None:
        """End the drains that were withdrawn before a transfer was announced which has succeeded.

        A mooncake prefill node reads what a rank sends in order, and one worker serves all transfers to one decode node in order:
        whatever it wrote by the old addresses was complete before. (Nixl has several workers.)
        """
        if not isinstance(decode_req.kv_receiver, MooncakeKVReceiver):
            return
        for entry in self._queue.queue:
            if isinstance(entry.kv_receiver, DrainingReceiver):
                entry.kv_receiver.succeeded_by(decode_req.kv_receiver, decode_req.announcement.number)


class DrainingReceiver:
    """Takes the place of an ended request's receiver in the transfer queue.

    Polls ``Success`` once nothing writes to this rank's slots any more, and ``Transferring`` until then.

    Args:
        receiver: the backend's.
        withdrawn: the number of the withdrawal; None where none was sent.
    """

    require_staging = False

    def __init__(self, receiver, withdrawn: Optional[int]) -> None:
        self._receiver = receiver
        self._withdrawn = withdrawn
        self._failed = False
        self._end = time.monotonic() + DRAIN_SECONDS

    def poll(self) -> KVPoll:
        state = self._receiver.poll()
        if state == KVPoll.Failed and not self._failed:
            # The layers of a chunk are written side by side, and the first that fails reports. Nor is a node that
            # misses heartbeats proven dead, and its network card may be alive.
            self._failed = True
            self._end = time.monotonic() + DRAIN_SECONDS
        ended = state == KVPoll.Success or time.monotonic() >= self._end
        return KVPoll.Success if ended else KVPoll.Transferring

    def succeeded_by(self, receiver, number: int) -> None:
        """A transfer of announcement ``number`` has succeeded, on all ranks."""
        same = _prefill_node(receiver) == _prefill_node(self._receiver)
        if same and self._withdrawn is not None and self._withdrawn < number and not self._failed:
            self._end = time.monotonic()

    def abort(self) -> None:
        """It has ended already."""

    def clear(self) -> None:
        """Forget the transfer."""
        self._receiver.clear()
        if isinstance(self._receiver, CommonKVReceiver):
            manager, room = self._receiver.kv_mgr, self._receiver.bootstrap_room
            manager.failure_records.pop(room, None)
            getattr(manager, "transfer_statuses", {}).pop(room, None)


def _prefill_node(receiver) -> tuple:
    return receiver.bootstrap_addr, receiver.prefill_dp_rank


def _failure(receiver) -> str:
    """Why a transfer failed, as far as this rank knows."""
    if not isinstance(receiver, CommonKVReceiver):
        return "unknown"
    return receiver.kv_mgr.failure_records.get(receiver.bootstrap_room, "another rank's transfer failed")


def _wait_on_after_timeout(receiver) -> None:
    """A receiver that has waited too long calls that a failure, but nobody has told it so: the transfer may go on."""
    if not isinstance(receiver, CommonKVReceiver) or receiver.conclude_state != KVPoll.Failed:
        return
    if receiver.kv_mgr.check_status(receiver.bootstrap_room) != KVPoll.Failed:
        receiver.conclude_state = None
        receiver.init_time = time.time()


def _page_0_is_free(receiver) -> bool:
    """Whether transfers can be redirected: padding rows own page 0 of a pool, but not of HiSparse's or of Mamba's."""
    if not isinstance(receiver, (MooncakeKVReceiver, NixlKVReceiver)):
        return False
    manager = receiver.kv_mgr
    paged = set(manager.kv_args.state_types) <= {StateType.NSA, StateType.SWA}
    return paged and not manager.server_args.enable_hisparse
