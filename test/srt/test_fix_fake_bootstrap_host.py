"""A lone decode node with the fake transfer backend takes a request that names no bootstrap host."""

import unittest

from harness import environment
from harness.scheduler import InprocScheduler
from tiny_model import TinySpec, write_checkpoint

from sglang.test.test_utils import CustomTestCase


class TestFakeBootstrapHost(CustomTestCase):
    def test_request_without_a_host_is_served(self):
        model = environment.MODELS / "tiny"
        write_checkpoint(model, TinySpec())
        with InprocScheduler(
            model,
            disaggregation_mode="decode",
            disaggregation_transfer_backend="fake",
            disable_radix_cache=True,
        ) as engine:
            # The tokenizer numbers rooms itself for this backend; hosts it leaves unset.
            rid = engine.submit(list(range(3, 103)), 5, bootstrap_room=1)
            engine.drain()
            self.assertEqual(engine.finished[rid]["type"], "length")


if __name__ == "__main__":
    unittest.main()
