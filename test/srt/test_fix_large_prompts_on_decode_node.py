"""Prompts that fill a decode node's pool but for less than its reserve get in once the node is idle."""

import unittest

from harness import environment, offload
from harness.delivery import Delivery, decode_node
from harness.scheduler import InprocScheduler
from tiny_model import TinySpec, write_checkpoint

from sglang.test.test_utils import CustomTestCase

CAPACITY, RESERVED = 704, 256
SMALL, LARGE, GROWING = offload.prompts([70, 500, 300])


def start():
    model = environment.MODELS / "tiny"
    write_checkpoint(model, TinySpec())
    settings = {**offload.server_args(), "max_total_tokens": CAPACITY}
    return InprocScheduler(model, **decode_node(**{**settings, "num_reserved_decode_tokens": RESERVED}))


def finish(engine, rid, rounds=600):
    engine.step_until(lambda: rid in engine.finished, rounds)
    return engine.finished[rid]["type"], len(engine.outputs[rid])


class TestLargePrompts(CustomTestCase):
    def test_one_that_leaves_less_than_the_reserve(self):
        with Delivery() as delivery, start() as engine:
            delivery.engine = engine
            first = engine.submit(SMALL, 20, **delivery.place(0))
            large = engine.submit(LARGE, 100, **delivery.place(1))
            behind = engine.submit(SMALL, 20, **delivery.place(0))
            self.assertEqual(finish(engine, large), ("length", 100))
            self.assertLess(list(engine.finished).index(first), list(engine.finished).index(large))
            self.assertEqual(finish(engine, behind), ("length", 20))
            self.assertEqual(engine.outputs[behind], engine.outputs[first])
            engine.drain()
            engine.idle_checks()

    def test_one_that_has_grown_and_is_retracted_by_a_pause(self):
        with Delivery() as delivery, start() as engine:
            delivery.engine = engine
            (alone,) = engine.run([GROWING], 300, **delivery.place(2))
            grown = engine.submit(GROWING, 300, **delivery.place(2))
            engine.step_until(lambda: len(engine.outputs[grown]) > CAPACITY - RESERVED - len(GROWING) + 5)
            engine.pause("retract")
            engine.step()
            engine.resume()
            self.assertEqual(finish(engine, grown), ("length", 300))
            self.assertEqual(engine.outputs[grown], alone)
            behind = engine.submit(SMALL, 20, **delivery.place(0))
            self.assertEqual(finish(engine, behind), ("length", 20))


if __name__ == "__main__":
    unittest.main()
