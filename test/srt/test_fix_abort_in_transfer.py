"""A request aborted while its KV is being transferred keeps its slots until the prefill node cannot write to them."""

import unittest
from unittest import mock

from harness import environment, offload
from harness.delivery import Delivery, decode_node
from harness.scheduler import InprocScheduler
from tiny_model import TinySpec, write_checkpoint

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

    def test_the_prefill_node_is_told_to_send_nothing(self):
        receiver = mock.Mock(bootstrap_infos=[{"rank_port": 1, "is_dummy": False}])
        receiver.poll.return_value = KVPoll.Transferring
        before = receiver.bootstrap_infos[0]
        aborted = draining.DrainingReceiver(receiver)
        self.assertEqual(receiver.bootstrap_infos, [{"rank_port": 1, "is_dummy": True}])
        self.assertFalse(before["is_dummy"])  # the connection's own record serves other requests
        (indices,), fields = receiver.send_metadata.call_args
        self.assertEqual((indices.size, fields), (0, {"aux_index": 0}))
        self.assertEqual(aborted.poll(), KVPoll.Transferring)
        for end in (KVPoll.Success, KVPoll.Failed):
            receiver.poll.return_value = end
            self.assertEqual(aborted.poll(), KVPoll.Failed)
        receiver.abort.assert_not_called()


if __name__ == "__main__":
    unittest.main()
