"""Stands in for the prefill node of an in-process decode node with the fake transfer backend.

    with Delivery() as delivery, InprocScheduler(model, **decode_node()) as engine:
        delivery.engine = engine
        rid = engine.submit(prompt, 16, **delivery.place(0))

Rows arrive in the pages that the decode node names, made from the number given to `place`: requests of one number get the same
rows, with and without offloading. A transfer can be held, so that a request stays in it, and then delivered, aborted or not.
"""

from typing import Any, Dict, List, NamedTuple, Set
from unittest import mock

import torch

PAGE = 64
KEY_BYTES = 128  # of a token; its scale follows the page's keys
FAKE_HOST = "2.2.2.2"


def decode_node(**more) -> Dict[str, Any]:
    """Arguments of a decode node."""
    return {
        "disaggregation_mode": "decode",
        "disaggregation_transfer_backend": "fake",
        "num_reserved_decode_tokens": 8,
        **more,
    }


class _Pages(NamedTuple):
    """Where a request's rows go: pages of latent KV from page ``first`` of its prompt on, and of index keys from 0 on."""

    first: int
    latent: List[int]
    index_keys: List[int]


class Delivery:
    """While open, fake transfers of this process deliver rows, when they are told to.

    Attributes:
        engine: the `InprocScheduler`; set once it is built.
    """

    def __init__(self) -> None:
        self.engine = None
        self._held: Set[int] = set()
        self._pages: Dict[int, _Pages] = {}
        self._numbers: Dict[int, int] = {}
        self._patches: List[Any] = []

    def place(self, number: int, hold: bool = False) -> Dict[str, Any]:
        """Fields of one request; ``hold`` keeps it in transfer until `deliver`."""
        room = len(self._numbers) + 1
        self._numbers[room] = number
        if hold:
            self._held.add(room)
        return {"bootstrap_host": FAKE_HOST, "bootstrap_room": room}

    def deliver(self, room: int) -> None:
        """Write a held request's rows, whatever has become of it."""
        self._write(room)
        self._held.discard(room)

    def release(self, room: int) -> None:
        """Let a held request's rows come as others' do, now or when it has slots."""
        self._held.discard(room)

    def __enter__(self) -> "Delivery":
        from sglang.srt.disaggregation.base import KVPoll
        from sglang.srt.disaggregation.fake.conn import FakeKVReceiver

        init, poll, send_metadata, delivery = FakeKVReceiver.__init__, FakeKVReceiver.poll, FakeKVReceiver.send_metadata, self

        def named_init(receiver, mgr, bootstrap_addr, bootstrap_room=None):
            init(receiver, mgr, bootstrap_addr, bootstrap_room)
            receiver.room, receiver.aborted = bootstrap_room, False

        def noted_metadata(receiver, kv_indices, aux_index=None, state_indices=None, decode_prefix_len=None):
            send_metadata(receiver, kv_indices, aux_index, state_indices, decode_prefix_len)
            if receiver.room in delivery._numbers:  # health checks are not
                pages = _Pages((decode_prefix_len or 0) // PAGE, list(kv_indices), list(state_indices[0]))
                delivery._pages[receiver.room] = pages

        def held_poll(receiver):
            """As a real receiver: one that was told to abort polls as failed at once."""
            if receiver.aborted:
                return KVPoll.Failed
            state = poll(receiver)
            if state != KVPoll.Success or receiver.room not in delivery._pages:
                return state
            if receiver.room in delivery._held:
                return KVPoll.Transferring
            delivery._write(receiver.room)
            return state

        def abort(receiver):
            receiver.aborted = True

        self._patches = [
            mock.patch.object(FakeKVReceiver, "__init__", named_init),
            mock.patch.object(FakeKVReceiver, "send_metadata", noted_metadata),
            mock.patch.object(FakeKVReceiver, "poll", held_poll),
            mock.patch.object(FakeKVReceiver, "abort", abort),
        ]
        for patch in self._patches:
            patch.start()
        return self

    def __exit__(self, *exc) -> None:
        for patch in self._patches:
            patch.stop()

    def _write(self, room: int) -> None:
        pool, pages, number = self.engine.kv_pool, self._pages.pop(room, None), self._numbers[room]
        if pages is None:  # delivered before
            return
        host_pool = getattr(pool, "host_pool", None)
        latent = pool.kv_buffer if host_pool is None else host_pool.kv_buffer
        for layer in range(pool.layer_num):
            for i, page in enumerate(pages.latent, pages.first):
                generator = torch.Generator().manual_seed(number << 20 | layer << 10 | i)
                rows = torch.randn(PAGE, 1, pool.kv_cache_dim, generator=generator) / 4
                latent[layer][page * PAGE : (page + 1) * PAGE] = rows.to(torch.bfloat16).view(latent[layer].dtype)
            for i, page in enumerate(pages.index_keys):
                generator = torch.Generator().manual_seed(number << 20 | layer << 10 | i)
                keys = torch.randint(0, 256, (PAGE * KEY_BYTES,), generator=generator, dtype=torch.int16)
                keys[keys & 0x7F == 0x7F] = 0  # no NaN
                row = pool.index_k_with_scale_buffer[layer][page].view(torch.uint8)
                row[: PAGE * KEY_BYTES] = keys.to(torch.uint8)
                row[PAGE * KEY_BYTES :].view(torch.float32).fill_(0.01)
