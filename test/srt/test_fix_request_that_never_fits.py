"""A decode node answers a request that it could never admit, and serves those behind it."""

import unittest

from harness import environment, offload
from harness.delivery import Delivery, decode_node
from harness.scheduler import InprocScheduler
from tiny_model import TinySpec, write_checkpoint

from sglang.test.test_utils import CustomTestCase

CAPACITY, RESERVED = 1024, 512


class TestRequestThatNeverFits(CustomTestCase):
    def test_answered_with_the_numbers(self):
        model = environment.MODELS / "tiny"
        write_checkpoint(model, TinySpec())
        settings = {**offload.server_args(), "max_total_tokens": CAPACITY, "num_reserved_decode_tokens": RESERVED}
        with Delivery() as delivery, InprocScheduler(model, **{**decode_node(), **settings}) as engine:
            delivery.engine = engine
            cases = ((512, 8, "length"), (513, 8, "abort"), (500, 500, "length"), (900, 8, "abort"))
            for length, new_tokens, end in cases:
                with self.subTest(length=length, new_tokens=new_tokens):
                    (ids,) = offload.prompts([length])
                    rid = engine.submit(ids, new_tokens, **delivery.place(0))
                    behind = engine.submit(ids[:5], 2, **delivery.place(1))
                    engine.step_until(lambda: behind in engine.finished, max_steps=800)
                    engine.drain()
                    self.assertEqual(engine.finished[rid]["type"], end)
                    self.assertEqual(engine.finished[behind]["type"], "length")
                    if end == "abort":
                        for word in (str(length), str(CAPACITY)):
                            self.assertIn(word, engine.finished[rid]["message"])
            engine.idle_checks()


if __name__ == "__main__":
    unittest.main()
