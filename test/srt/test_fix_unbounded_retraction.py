"""A decode node whose pool will not save every retracted request: one ends with an error at most, and no tokens change."""

import contextlib
import unittest
from unittest import mock

from harness import environment, offload
from harness.delivery import Delivery, decode_node
from harness.scheduler import InprocScheduler
from tiny_model import TinySpec, write_checkpoint

from sglang.srt.managers.schedule_batch import ScheduleBatch
from sglang.srt.mem_cache.memory_pool import CPUCopyRefused, NSATokenToKVPool
from sglang.test.test_utils import CustomTestCase

PROMPTS = offload.prompts([60, 130, 300])
NEW_TOKENS = 20


class TestUnboundedRetraction(CustomTestCase):
    @classmethod
    def setUpClass(cls):
        model = environment.MODELS / "tiny"
        write_checkpoint(model, TinySpec())
        with contextlib.ExitStack() as stack:
            cls.delivery = stack.enter_context(Delivery())
            cls.engine = stack.enter_context(
                InprocScheduler(model, **decode_node(**offload.server_args()))
            )
            stack.enter_context(mock.patch("torch.cuda.synchronize"))  # saving waits for a GPU
            cls.addClassCleanup(stack.pop_all().close)
        cls.delivery.engine = cls.engine
        cls.alone = [
            cls.engine.run([ids], NEW_TOKENS, **cls.delivery.place(i))[0] for i, ids in enumerate(PROMPTS)
        ]

    def setUp(self):
        self.saved = []

    @contextlib.contextmanager
    def running(self, most_tokens):
        """All three requests, while the pool saves up to a number of tokens; at the end they have their tokens."""
        save = NSATokenToKVPool.get_cpu_copy

        def bounded(pool, indices, mamba_indices=None):
            if len(indices) > most_tokens:
                raise CPUCopyRefused(f"{len(indices)} tokens")
            self.saved.append(len(indices))
            return save(pool, indices)

        self.ended = None
        with mock.patch.object(NSATokenToKVPool, "get_cpu_copy", bounded):
            rids = [
                self.engine.submit(ids, NEW_TOKENS, **self.delivery.place(i)) for i, ids in enumerate(PROMPTS)
            ]
            self.engine.step_until(lambda: all(len(self.engine.outputs[rid]) > 5 for rid in rids))
            yield rids
            self.engine.drain()
        for rid, tokens in zip(rids, self.alone):
            if rid == self.ended:
                tokens = tokens[: len(self.engine.outputs[rid])]
            self.assertEqual(self.engine.outputs[rid], tokens)

    def test_the_next_that_is_saved_is_retracted(self):
        with self.running(most_tokens=200):
            self.engine.retract(1)
            self.assertEqual([length // 10 for length in self.saved], [13])

    def test_one_ends_where_none_is_saved(self):
        with self.running(most_tokens=0) as rids:
            self.ended = rids[2]
            self.engine.retract(1)
        reason = self.engine.finished[self.ended]
        self.assertEqual((reason["type"], int(reason["status_code"])), ("abort", 503))
        self.assertRegex(reason["message"], r"3\d\d tokens")

    def test_a_pause_leaves_the_others_running(self):
        with self.running(most_tokens=200) as rids:
            self.engine.pause("retract")
            self.engine.step()
            self.assertEqual([req.rid for req in self.engine.scheduler.running_batch.reqs], rids[2:])
            self.engine.resume()
            self.assertEqual(len(self.saved), 2)

    def test_a_request_that_is_aborted_is_not_saved(self):
        rid = self.engine.submit(PROMPTS[0], NEW_TOKENS, **self.delivery.place(0))
        self.engine.step_until(lambda: self.engine.outputs[rid])
        with mock.patch.object(ScheduleBatch, "check_decode_mem", lambda *a, **k: False), mock.patch.object(
            NSATokenToKVPool, "get_cpu_copy"
        ) as save:
            self.engine.drain()
        self.assertEqual(self.engine.finished[rid]["type"], "abort")
        save.assert_not_called()


if __name__ == "__main__":
    unittest.main()
