"""A request aborted while its KV is being transferred keeps its slots until the prefill node cannot write to them."""

import unittest
from types import SimpleNamespace
from unittest import mock

from harness import environment, offload
from harness.delivery import Delivery, decode_node
from harness.scheduler import InprocScheduler
from tiny_model import TinySpec, write_checkpoint

import numpy as np

from sglang.srt.disaggregation import draining
from sglang.srt.disaggregation.base import KVPoll
from sglang.test.test_utils import CustomTestCase

PROMPTS = offload.prompts([60, 250, 70])
NEW_TOKENS = 100


def start(max_total_tokens=640):
    model = environment.MODELS / "tiny"
    write_checkpoint(model, TinySpec())
    settings = {**offload.server_args(), "max_total_tokens": max_total_tokens}
    return InprocScheduler(model, **decode_node(**settings))


def draining_for(seconds):
    return mock.patch.object(draining, "DRAIN_SECONDS", seconds)


class TestAbortInTransfer(CustomTestCase):
    def test_a_late_write_meets_no_other_request(self):
        with draining_for(3600), Delivery() as delivery, start(512) as engine:
            delivery.engine = engine
            (alone,) = engine.run(PROMPTS[:1], NEW_TOKENS, **delivery.place(0))
            engine.flush()
            place = delivery.place(1, hold=True)
            victim = engine.submit(PROMPTS[1], 4, **place)  # pages 1 to 4 of 8: the first that are reused
            engine.step_until(lambda: engine.scheduler.disagg_decode_transfer_queue.queue)
            running = engine.submit(PROMPTS[0], NEW_TOKENS, **delivery.place(0))
            engine.step_until(lambda: engine.outputs[running])
            engine.step_until(lambda rid=engine.submit(PROMPTS[2], 4, **delivery.place(2)): rid in engine.finished)
            engine.abort(victim)
            engine.step()
            engine.step()
            self.assertEqual(engine.finished[victim]["type"], "abort")
            engine.step_until(lambda: len(engine.outputs[running]) > 75)  # it has got a page of one that ended
            delivery.deliver(place["bootstrap_room"])
            engine.drain()
            self.assertEqual(engine.outputs[running], alone)
            self.assertEqual(engine.outputs[victim], [])

    def test_a_prefill_node_that_never_ends_the_transfer(self):
        with draining_for(3600), Delivery() as delivery, start() as engine:
            delivery.engine = engine
            victim = engine.submit(PROMPTS[1], 4, **delivery.place(1, hold=True))
            transfers = engine.scheduler.disagg_decode_transfer_queue
            engine.step_until(lambda: transfers.queue)
            engine.abort(victim)
            engine.step()
            engine.step()
            self.assertIn(victim, engine.finished)
            self.assertFalse(engine.scheduler.is_fully_idle())
            transfers.queue[0].kv_receiver._end -= 3600
            engine.drain()
            engine.idle_checks()

    def test_one_that_waits_for_slots_never_gets_any(self):
        with Delivery() as delivery, start() as engine:
            delivery.engine = engine
            rids = [engine.submit(PROMPTS[1], 20, **delivery.place(1)) for _ in range(3)]
            queue = engine.scheduler.disagg_decode_prealloc_queue
            engine.step_until(lambda: engine.outputs[rids[0]])
            (victim,) = [entry.req.rid for entry in queue.queue]
            engine.abort(victim)
            engine.step()
            engine.step()
            self.assertEqual(engine.finished[victim]["type"], "abort")
            engine.drain()


class Receiver:
    """A backend's receiver; ``state`` is what its transfer has come to on one rank."""

    def __init__(self, state=KVPoll.Transferring):
        self.state, self.cleared, self.sent = state, 0, []
        self.bootstrap_infos = [{"rank_port": 1, "is_dummy": False}]
        self.bootstrap_addr, self.prefill_dp_rank = "host:1", 0

    def poll(self):
        return self.state

    def send_metadata(self, indices, aux_index=None, state_indices=None, **more):
        self.sent.append((list(indices), aux_index, state_indices, [info["is_dummy"] for info in self.bootstrap_infos]))

    def clear(self):
        self.cleared += 1


class Ranks:
    """One request in the transfer queues of ranks that reduce their polls to the least of them, as SGLang's do."""

    def __init__(self, count=2):
        self.entries, self.parts, self.answered = [], [], []
        for rank in range(count):
            queue = SimpleNamespace(tp_rank=rank, queue=[], req_to_metadata_buffer_idx_allocator=mock.Mock())
            queue.scheduler = SimpleNamespace(stream_output=lambda reqs, *_, rank=rank: self.answered.append(rank))
            queue.req_to_metadata_buffer_idx_allocator.alloc.return_value = 9
            entry = SimpleNamespace(kv_receiver=Receiver(), req=mock.Mock(rid="r", bootstrap_room=1), announcement=None)
            queue.queue.append(entry)
            part = draining.Draining(queue)
            part.announced(entry, np.array([3, 4], dtype=np.int32), [np.array([3, 4], dtype=np.int32)], 0)
            self.entries.append(entry)
            self.parts.append(part)

    def abort(self):
        for part, entry in zip(self.parts, self.entries):
            part.abort(entry)

    def step(self, *states):
        """One round of the queue, with the transfers' states by rank; what every rank decides."""
        for receiver, state in zip(self.receivers, states):
            receiver.state = state
        poll = min(entry.kv_receiver.poll() for entry in self.entries)
        decided = {part.decide(entry, poll) for part, entry in zip(self.parts, self.entries)}
        assert len(decided) == 1, "ranks decide differently"
        return decided.pop()

    @property
    def receivers(self):
        return [getattr(entry.kv_receiver, "_receiver", entry.kv_receiver) for entry in self.entries]


T, S, F = KVPoll.Transferring, KVPoll.Success, KVPoll.Failed


class TestRanks(CustomTestCase):
    def setUp(self):
        patcher = mock.patch.object(draining, "prepare_abort")
        patcher.start()
        self.addCleanup(patcher.stop)

    def decided(self, *steps, aborted=True, seconds=3600):
        with draining_for(seconds):
            ranks = Ranks(len(steps[0]))
            if aborted:
                ranks.abort()
            return ranks, [ranks.step(*states) for states in steps]

    def test_slots_are_free_when_all_ranks_have_ended(self):
        _, decided = self.decided((T, T), (T, T), (S, T), (S, T), (S, S))
        self.assertEqual(decided, [T, T, T, T, F])

    def test_one_rank_fails_first(self):
        """The others' writes go on, and so may its own: layers are written side by side, and the first failure reports."""
        for aborted in (True, False):
            ranks, decided = self.decided((T, T), (F, T), (F, T), (F, S), aborted=aborted)
            self.assertEqual(decided, [T, T, T, T])
            self.assertEqual(sorted(ranks.answered), [0, 1])  # the client is answered at once
            for entry in ranks.entries:
                entry.kv_receiver._end -= 3600
            self.assertEqual(ranks.step(F, T), F)

    def test_failure_of_all_is_answered_once(self):
        ranks, decided = self.decided((F, F), (F, F), aborted=False, seconds=0)
        self.assertEqual(decided, [T, F])
        self.assertEqual(sorted(ranks.answered), [0, 1])

    def test_success_without_an_abort(self):
        self.assertEqual(self.decided((T, S), (S, S), aborted=False)[1], [T, S])

    def test_an_ended_transfer_is_not_announced_again(self):
        """A prefill node keeps for ever what it is told of a room that it has forgotten."""
        for state, sends in ((T, 1), (S, 0), (F, 0)):
            ranks = Ranks(1)
            ranks.receivers[0].state = state
            ranks.abort()
            ranks.abort()
            self.assertEqual(len(ranks.receivers[0].sent), sends)

    def test_another_backend_is_told_to_send_nothing(self):
        ranks = Ranks(1)
        own = ranks.receivers[0].bootstrap_infos[0]
        ranks.abort()
        self.assertEqual(ranks.receivers[0].sent, [([], 0, None, [True])])
        self.assertFalse(own["is_dummy"])  # the connection's own record serves other requests

    def test_transfers_are_redirected_to_the_page_that_no_request_owns(self):
        with mock.patch.object(draining, "_page_0_is_free", return_value=True):
            ranks = Ranks(1)
            ranks.abort()
        ((indices, buffer, (state,), dummies),) = ranks.receivers[0].sent
        self.assertEqual((indices, buffer, state.tolist(), dummies), ([0, 0], 9, [0, 0], [False]))

    def test_a_later_transfer_that_has_succeeded_ends_the_drain(self):
        """A mooncake prefill node reads and writes in the order of what it is told."""
        redirected = mock.patch.object(draining, "_page_0_is_free", return_value=True)
        with mock.patch.object(draining, "MooncakeKVReceiver", Receiver), redirected, draining_for(3600):
            ranks = Ranks(1)
            part, queue = ranks.parts[0], ranks.parts[0]._queue
            earlier, later = (SimpleNamespace(kv_receiver=Receiver(), req=mock.Mock(), announcement=None) for _ in range(2))
            part.announced(earlier, np.zeros(1), [], 0)
            ranks.abort()
            part.announced(later, np.zeros(1), [], 0)
            queue.queue += [earlier, later]
            for entry, ended in ((earlier, T), (later, F)):  # one announced before the withdrawal proves nothing
                entry.kv_receiver.state = S
                self.assertEqual(part.decide(entry, S), S)
                self.assertEqual(ranks.step(T), ended)

    def test_a_timeout_is_not_an_end(self):
        """Nobody has told the prefill node, which still has the addresses."""
        manager = SimpleNamespace(check_status=lambda room: KVPoll.Transferring)
        with mock.patch.object(draining, "CommonKVReceiver", Receiver), draining_for(3600):
            ranks = Ranks(1)
            receiver = ranks.receivers[0]
            receiver.conclude_state, receiver.init_time, receiver.bootstrap_room = F, 1.0, 1
            receiver.kv_mgr = SimpleNamespace(check_status=manager.check_status, failure_records={})
            receiver.poll = lambda: receiver.state if receiver.conclude_state is None else receiver.conclude_state
            self.assertEqual(ranks.step(T), T)
            self.assertIsNone(receiver.conclude_state)
            self.assertEqual(len(receiver.sent), 1)
            self.assertEqual([ranks.step(T), ranks.step(S)], [T, F])


if __name__ == "__main__":
    unittest.main()
