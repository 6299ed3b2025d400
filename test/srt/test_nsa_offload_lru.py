"""Residency over many steps against one dict a window and layer: exact slots, exact eviction order."""

import random
import unittest

import nsa_offload_oracle as oracle  # first: turns on the interpreter
import torch

from sglang.srt.mem_cache.sparsity.nsa_offload import lru_cache
from sglang.test.test_utils import CustomTestCase

DEVICE = oracle.DEVICE
LAYERS, WINDOWS, LRU, RING, CONTEXT, K = 2, 3, 24, 4, 400, 16


class Simulation:
    """Requests that come and go over the windows of one LRUCacheState.

    Every step compares hits, loads and victims with the oracle; `compare_tables` the tables.
    """

    def __init__(self, module=lru_cache, seed=0, k=K, layers=LAYERS):
        self.rng, self.k, self.layers = random.Random(seed), k, layers
        self.lru = module.LRUCacheState(layers, WINDOWS, LRU, RING, CONTEXT, DEVICE)
        self.seq_len, self.windows = {}, {}  # of each owned window; an oracle a layer
        self.recent = {}

    def admit(self):
        window = self.rng.choice([w for w in range(WINDOWS) if w not in self.windows])
        prompt = self.rng.randint(1, 60)
        self.lru.ring_begin[window] = prompt
        self.seq_len[window] = prompt
        self.windows[window] = [
            oracle.WindowOracle(LRU, RING, prompt) for _ in range(self.layers)
        ]
        self.recent[window] = []

    def release(self):
        window = self.rng.choice(sorted(self.windows))
        del self.windows[window], self.seq_len[window]
        self.lru.reset_windows(torch.tensor([window], device=DEVICE))

    def topk(self, window):
        """Mostly what the last step used, so that hits, misses and evictions all occur."""
        length = self.seq_len[window]
        count = min(length, self.rng.choice((self.k, self.k, 3)))
        old = [p for p in self.recent[window] if self.rng.random() < 0.7]
        new = self.rng.sample(range(length), count)
        chosen = list(dict.fromkeys(old + [length - 1] * (self.rng.random() < 0.5) + new))
        chosen = chosen[:count]
        self.recent[window] = chosen
        row = chosen + [-1] * (self.k - count)
        self.rng.shuffle(row)
        return row

    def step(self):
        batch = [w for w in self.windows if self.seq_len[w] < CONTEXT]
        self.rng.shuffle(batch)
        for window in batch:
            self.seq_len[window] += 1
        padding = self.rng.randint(0, 1)
        windows = torch.tensor(batch + [-1] * padding, dtype=torch.int32, device=DEVICE)
        lens = torch.tensor([self.seq_len[w] for w in batch] + [1] * padding, device=DEVICE)
        for layer in range(self.layers):
            rows = [self.topk(w) for w in batch] + [list(range(self.k))] * padding
            topk = torch.tensor(rows, dtype=torch.int32, device=DEVICE).view(-1, self.k)
            swap = self.lru.prepare_layer_swap(layer, topk, windows, lens)
            self.lru.lru_post_process(layer, windows, swap)
            offsets, ranks, misses, counts, victims = (t.tolist() for t in swap)
            for b, window in enumerate(batch):
                expected, loads = self.windows[window][layer].step(
                    rows[b], self.seq_len[window]
                )
                got = [victims[b][r] if r >= 0 else o for o, r in zip(offsets[b], ranks[b])]
                assert got == expected, f"offsets {got}, not {expected}"
                got = list(zip(misses[b], victims[b]))[: counts[b]]
                assert got == loads, f"loads {got}, not {loads}"
            assert all(counts[b] == 0 for b in range(len(batch), len(rows)))

    def compare_tables(self):
        self.lru.check_integrity()
        total = 0
        for window in range(WINDOWS):
            for layer in range(self.layers):
                table = self.lru.offset_of_position[layer, window].tolist()
                resident = {p: o for p, o in enumerate(table) if o >= 0}
                order = self.lru.lru_order[layer, window].tolist()
                if window in self.windows:
                    expected = self.windows[window][layer]
                    assert order == list(expected.entries.values()), "order"
                    assert resident == expected.resident(), "resident"
                else:
                    assert order == list(range(LRU)) and not resident, "not reset"
                total += len(resident)
        assert self.lru.resident_entries() == total

    def run(self, steps: int):
        for _ in range(steps):
            if len(self.windows) < WINDOWS and self.rng.random() < 0.4:
                self.admit()
            elif self.windows and self.rng.random() < 0.05:
                self.release()
            self.step()
            self.compare_tables()


class TestSimulation(CustomTestCase):
    def test_three_hundred_steps(self):
        simulation = Simulation(layers=1)
        simulation.run(300)
        hits, ring_hits, misses = simulation.lru.counters.sum(0).tolist()
        self.assertGreater(min(hits, ring_hits, misses), 500)

    def test_layers(self):
        Simulation(seed=2).run(30)

    def test_topk_as_large_as_the_window(self):
        Simulation(seed=1, k=LRU).run(20)

    def test_window_that_fills_and_evicts_the_oldest(self):
        """By hand: fill a window, use the oldest row again, load one row more."""
        lru = lru_cache.LRUCacheState(1, 1, 4, 1, 100, DEVICE)
        lru.ring_begin[0] = 99
        windows = torch.tensor([0], dtype=torch.int32, device=DEVICE)

        def step(*positions):
            row = list(positions) + [-1] * (4 - len(positions))
            topk = torch.tensor([row], dtype=torch.int32, device=DEVICE)
            swap = lru.prepare_layer_swap(0, topk, windows, torch.tensor([99], device=DEVICE))
            lru.lru_post_process(0, windows, swap)

        for position in (10, 11, 12, 13):
            step(position)
        step(10)
        step(20)
        self.assertEqual(lru.offset_of_position[0, 0, 11].item(), -1)
        held = lru.position_at_offset[0, 0][lru.lru_order[0, 0].long()]
        self.assertEqual(held.tolist(), [12, 13, 10, 20])
        self.assertEqual(lru.counters.tolist(), [[1, 0, 5]])


class TestReset(CustomTestCase):
    def test_only_the_named_windows(self):
        simulation = Simulation(seed=3)
        for _ in range(3):
            simulation.admit()
        for _ in range(4):
            simulation.step()
        keep, *gone = simulation.windows
        names = ("offset_of_position", "position_at_offset", "lru_order")
        before = {name: getattr(simulation.lru, name).clone() for name in names}
        simulation.lru.reset_windows(torch.tensor(gone, device=DEVICE))
        fresh = lru_cache.LRUCacheState(LAYERS, WINDOWS, LRU, RING, CONTEXT, DEVICE)
        for name in names:
            after = getattr(simulation.lru, name)
            self.assertTrue(torch.equal(after[:, keep], before[name][:, keep]))
            self.assertTrue(torch.equal(after[:, gone], getattr(fresh, name)[:, gone]))
        self.assertTrue((simulation.lru.ring_begin[gone] == 0).all())
        simulation.lru.check_integrity()


class TestIntegrity(CustomTestCase):
    """Each table, put wrong by hand, is reported."""

    def test_each(self):
        faults = {
            "permutation": lambda lru: lru.lru_order[0, 0, :2].fill_(3),
            "never post-processed": lambda lru: lru._touched[0, 0].fill_(1),
            "disagree": lambda lru: lru.offset_of_position[0, 0, 399].fill_(2),
            "no table entry": lambda lru: lru.position_at_offset[:, 2].fill_(7),
        }
        for words, spoil in faults.items():
            with self.subTest(words):
                simulation = Simulation(seed=4)
                simulation.admit()
                simulation.step()
                simulation.lru.check_integrity()
                spoil(simulation.lru)
                with self.assertRaisesRegex(RuntimeError, words):
                    simulation.lru.check_integrity()


class TestFaultsAreSeen(CustomTestCase):
    FAULTS = {
        "layer offset lost in the residency": ("self.offset_of_position[layer]", "self.offset_of_position[0]"),
        "layer offset lost in the order": ("self.lru_order[layer]", "self.lru_order[0]"),
        "layer offset lost in the reverse table": ("self.position_at_offset[layer]", "self.position_at_offset[0]"),
        "next owner finds the mapping": ("self.offset_of_position[:, windows] = -1", "pass"),
        "next owner finds the reverse mapping": ("self.position_at_offset[:, windows] = -1", "pass"),
        "next owner finds the order": ("self.lru_order[:, windows] = self._first_order", "pass"),
        "one layer reset": ("self.offset_of_position[:, windows]", "self.offset_of_position[0, windows]"),
        "victims are the newest": ("self.lru_order[layer],\n            self._touched,\n            topk", "self.lru_order[layer].flip(-1),\n            self._touched,\n            topk"),
        "nothing is entered": ("kernels.lru_post_process(", "self._touched.zero_() if swap else ("),
        "ring of one": ("self.lru_slots,\n            self.ring_slots,", "self.lru_slots,\n            1,"),
        "marks of another step": ("self._touched,\n            self.counters", "self._touched.clone(),\n            self.counters"),
    }  # fmt: skip

    def test_each(self):
        for name, (old, new) in self.FAULTS.items():
            with self.subTest(name):
                simulation = Simulation(oracle.mutated(lru_cache, old, new), seed=5)
                with self.assertRaises((AssertionError, RuntimeError)):
                    simulation.run(40)


if __name__ == "__main__":
    unittest.main()
