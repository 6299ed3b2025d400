"""Flushes and weight updates in the very round of the event loop after an answer, and over a request that still runs."""

import unittest

from harness import environment, offload
from harness.scheduler import InprocScheduler
from tiny_model import TinySpec, write_checkpoint

from sglang.srt.managers.io_struct import (
    FlushCacheReqInput,
    FlushCacheReqOutput,
    UpdateWeightFromDiskReqInput,
    UpdateWeightFromDiskReqOutput,
)
from sglang.test.test_utils import CustomTestCase

PROMPTS = offload.prompts([130, 200])
NEW_TOKENS = 8
MODEL = environment.MODELS / "tiny"


class TestFlushAfterAnAnswer(CustomTestCase):
    @classmethod
    def setUpClass(cls):
        write_checkpoint(MODEL, TinySpec())

    def test_after_the_answer(self):
        for overlap in (False, True):
            with InprocScheduler(MODEL, overlap=overlap, **offload.server_args()) as engine:
                (first,) = engine.run(PROMPTS[:1], NEW_TOKENS)
                for new_tokens in (NEW_TOKENS, 1):  # ends in a decode batch, or in the prefill
                    for message, answer in (
                        (FlushCacheReqInput(), FlushCacheReqOutput),
                        (UpdateWeightFromDiskReqInput(model_path=str(MODEL), load_format="auto"), UpdateWeightFromDiskReqOutput),
                    ):
                        with self.subTest(overlap=overlap, new_tokens=new_tokens, message=type(message).__name__):
                            rid = engine.submit(PROMPTS[0], new_tokens)
                            engine.step_until(lambda: rid in engine.finished)
                            self.assertTrue(self.answer(engine, message, answer).success)
                            engine.idle_checks()
                            self.assertEqual(engine.run(PROMPTS[:1], NEW_TOKENS), [first])

    def test_over_a_running_request(self):
        """It is refused, the server lives, and the request has its tokens."""
        update = UpdateWeightFromDiskReqInput(model_path=str(MODEL), load_format="auto")
        for overlap in (False, True):
            with InprocScheduler(MODEL, overlap=overlap, **offload.server_args()) as engine:
                wanted = engine.run(PROMPTS, NEW_TOKENS)
                for busy in ("running", "paused", "aborted"):
                    with self.subTest(overlap=overlap, busy=busy):
                        rids = [engine.submit(ids, NEW_TOKENS) for ids in PROMPTS]
                        engine.step_until(lambda: all(len(engine.outputs[rid]) > 2 for rid in rids))
                        if busy == "paused":
                            engine.pause("in_place")
                        elif busy == "aborted":  # its client has gone
                            engine.abort(rids[1])
                        answer = self.answer(engine, update, UpdateWeightFromDiskReqOutput)
                        self.assertFalse(answer.success)
                        self.assertIn("Weights are not updated", answer.message)
                        engine.resume()
                        engine.drain()
                        self.assertEqual(engine.outputs[rids[0]], wanted[0])
                        if busy != "aborted":
                            self.assertEqual(engine.outputs[rids[1]], wanted[1])
                        self.assertTrue(self.answer(engine, update, UpdateWeightFromDiskReqOutput).success)

    def answer(self, engine, message, kind):
        """Send a message into the next round; returns its answer."""
        engine.control(message)
        engine.step()
        return [reply for reply in engine.replies if isinstance(reply, kind)][-1]


if __name__ == "__main__":
    unittest.main()
