"""Pre-allocation on a decode node leaves a running request the pages it will grow into."""

import unittest

from harness import environment, offload
from harness.delivery import Delivery, decode_node
from harness.scheduler import InprocScheduler
from tiny_model import TinySpec, write_checkpoint

from sglang.test.test_utils import CustomTestCase

LONG, HALF, SHORT = offload.prompts([60, 100, 5])
NEW_TOKENS = 40


class TestPageRounding(CustomTestCase):
    def test_a_small_request_does_not_take_the_last_page(self):
        model = environment.MODELS / "tiny"
        write_checkpoint(model, TinySpec())
        settings = {**offload.server_args(), "max_total_tokens": 256}  # 4 pages
        with Delivery() as delivery, InprocScheduler(model, **decode_node(**settings)) as engine:
            delivery.engine = engine
            running = engine.submit(LONG, NEW_TOKENS, **delivery.place(0))
            engine.step_until(lambda: engine.outputs[running])
            places = [delivery.place(1, hold=True), delivery.place(2, hold=True)]
            others = [engine.submit(ids, 4, **place) for ids, place in zip((HALF, SHORT), places)]
            engine.step_until(lambda: running in engine.finished)
            self.assertEqual(engine.finished[running]["type"], "length")
            for place in places:
                delivery.release(place["bootstrap_room"])
            engine.drain()
            self.assertEqual([engine.finished[rid]["type"] for rid in others], ["length", "length"])


if __name__ == "__main__":
    unittest.main()
