"""A decode node paused in mode "retract" restores the KV it saved, and its requests go on with the same tokens."""

import unittest
from unittest import mock

from harness import environment, offload
from harness.delivery import Delivery, decode_node
from harness.scheduler import InprocScheduler
from tiny_model import TinySpec, write_checkpoint

from sglang.test.test_utils import CustomTestCase

PROMPTS = offload.prompts([60, 130])
NEW_TOKENS = 20


class TestPauseOnDecodeNode(CustomTestCase):
    def test_requests_continue_with_the_same_tokens(self):
        model = environment.MODELS / "tiny"
        write_checkpoint(model, TinySpec())
        with Delivery() as delivery, InprocScheduler(model, **decode_node(**offload.server_args())) as engine:
            delivery.engine = engine
            alone = [engine.run([ids], NEW_TOKENS, **delivery.place(i))[0] for i, ids in enumerate(PROMPTS)]
            rids = [engine.submit(ids, NEW_TOKENS, **delivery.place(i)) for i, ids in enumerate(PROMPTS)]
            engine.step_until(lambda: all(len(engine.outputs[rid]) > 5 for rid in rids))
            with mock.patch("torch.cuda.synchronize"):  # the pool saves KV as on a GPU
                engine.pause("retract")
                engine.step()
            engine.resume()
            engine.drain()
            self.assertEqual([engine.outputs[rid] for rid in rids], alone)


if __name__ == "__main__":
    unittest.main()
