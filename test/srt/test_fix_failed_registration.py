"""A node whose memory mooncake could not register does not start."""

import unittest
from types import SimpleNamespace

from sglang.srt.disaggregation.mooncake.conn import MooncakeKVManager
from sglang.test.test_utils import CustomTestCase

REGIONS = {"kv": ([1 << 20, 2 << 20], [3_000_000_000, 4_000_000_000]), "aux": ([3 << 20], [5000]), "state": ([4 << 20], [6_000_000])}


class Engine:
    """Registers all but the regions at one address."""

    def __init__(self, refused=None):
        self.refused, self.registered = refused, []

    def batch_register(self, pointers, lengths):
        if self.refused in pointers:
            return -1
        self.registered += pointers
        return 0


def manager(engine):
    made = MooncakeKVManager.__new__(MooncakeKVManager)
    made.engine = engine
    fields = {f"{name}_data_{kind}": part for name, both in REGIONS.items() for kind, part in zip(("ptrs", "lens"), both)}
    fields.update(state_data_ptrs=[REGIONS["state"][0], []], state_data_lens=[REGIONS["state"][1], []])
    made.kv_args = SimpleNamespace(**fields)
    return made


class TestFailedRegistration(CustomTestCase):
    def test_all_is_registered(self):
        engine = Engine()
        manager(engine).register_buffer_to_engine()
        self.assertEqual(engine.registered, [1 << 20, 2 << 20, 3 << 20, 4 << 20])

    def test_refused_at_start(self):
        for refused, words in (
            (2 << 20, ["7.00 GB of KV", "2 regions"]),
            (3 << 20, ["0.00 GB of metadata"]),
            (4 << 20, ["0.01 GB of state"]),
        ):
            with self.subTest(refused=refused), self.assertRaises(RuntimeError) as caught:
                manager(Engine(refused)).register_buffer_to_engine()
            for word in (*words, "code -1", "ulimit -l", "memlock=-1", "--disaggregation-ib-device"):
                self.assertIn(word, str(caught.exception))


if __name__ == "__main__":
    unittest.main()
