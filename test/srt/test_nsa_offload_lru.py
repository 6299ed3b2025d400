"""The residency tables behind the kernels, over many steps, layers and owners of the windows."""

import random
import unittest

import nsa_offload_tools as tools
import torch
from nsa_swap_oracle import age_bucket

from sglang.jit_kernel import nsa_kv_offload as kernels
from sglang.srt.mem_cache.sparsity.nsa_offload import lru_cache
from sglang.test.test_utils import CustomTestCase

DEVICE = tools.DEVICE
LAYERS, WINDOWS, LRU, RING, CONTEXT, K = 2, 3, 24, 4, 400, 16
FIRST_WINDOW_SLOT, ROWS = 64, 7


def setUpModule():
    tools.need_kernels()


class Simulation:
    """Requests that come and go over the windows; each step is checked against dicts."""

    def __init__(self, module=lru_cache, seed=0):
        self.rng = random.Random(seed)
        self.lru = module.LRUCacheState(LAYERS, WINDOWS, LRU, RING, DEVICE)
        self.queue = kernels.MissQueue(WINDOWS, K, ROWS * CONTEXT, DEVICE)
        self.req_to_token = torch.randperm(ROWS * CONTEXT).view(ROWS, CONTEXT).int().to(DEVICE)
        self.seq_len, self.first, self.row, self.held, self.used = {}, {}, {}, {}, {}

    def admit(self):
        window = self.rng.choice([w for w in range(WINDOWS) if w not in self.seq_len])
        self.seq_len[window] = self.first[window] = self.rng.randint(1, 300)
        self.row[window] = self.rng.choice(sorted(set(range(ROWS)) - set(self.row.values())))
        self.held[window] = [{} for _ in range(LAYERS)]  # position to offset
        self.used[window] = [{} for _ in range(LAYERS)]  # offset to length at its last use
        self.lru.begin_windows(
            torch.tensor([window], device=DEVICE), torch.tensor([self.first[window]], device=DEVICE)
        )

    def release(self):
        window = self.rng.choice(sorted(self.seq_len))
        for table in (self.seq_len, self.first, self.row, self.held, self.used):
            del table[window]
        self.lru.reset_windows(torch.tensor([window], device=DEVICE))

    def step(self):
        batch = [w for w in self.seq_len if self.seq_len[w] < CONTEXT]
        for window in batch:
            self.seq_len[window] += 1
        windows = torch.tensor([*batch, -1], dtype=torch.int32, device=DEVICE)
        rows = torch.tensor([*(self.row[w] for w in batch), 0], dtype=torch.int32, device=DEVICE)
        lens = torch.tensor(
            [*(self.seq_len[w] for w in batch), 9], dtype=torch.int32, device=DEVICE
        )
        for layer in range(LAYERS):
            topk = []
            for window in batch:
                length = self.seq_len[window]
                recent = [p for p in self.held[window][layer] if self.rng.random() < 0.4]
                fresh = self.rng.sample(range(length), min(length, K))
                chosen = list(dict.fromkeys([*recent, length - 1, *fresh]))[:K]
                topk.append(chosen + [-1] * (K - len(chosen)))
            tensor = torch.tensor([*topk, [0] * K], dtype=torch.int32, device=DEVICE)
            table = self.lru.prepare_layer_swap(
                layer, tensor, windows, lens, rows, self.req_to_token, FIRST_WINDOW_SLOT, self.queue
            ).tolist()
            count = int(self.queue.state[0])
            slots = zip(self.queue.host_slots[:count].tolist(), self.queue.device_slots[:count].tolist())
            self.queue.state.zero_()
            self.queue.wanted.zero_()
            expected = []
            for window, entries, got in zip(batch, topk, table):
                expected += self.check(window, layer, entries, got)
            assert sorted(slots) == sorted(expected), "loads"
            assert table[-1] == [0] * K, "padding"

    def check(self, window, layer, entries, got):
        """Compare one row; returns the loads it has to queue."""
        length, base = self.seq_len[window], FIRST_WINDOW_SLOT + window * (LRU + RING)
        held, used, loads = self.held[window][layer], self.used[window][layer], []
        first_in_ring = max(self.first[window], length - RING)
        touched = {held[p] for p in entries if p in held and p < first_in_ring}
        before = {o: age_bucket(length - used[o]) if o in used else 1 << 20 for o in range(LRU)}
        evicted = set()
        for position, slot in zip(entries, got):
            if position < 0:
                assert slot == -1, "none"
            elif position >= first_in_ring:
                assert slot == base + LRU + position % RING, "ring"
            elif position in held and held[position] not in evicted:
                assert slot == base + held[position], "hit"
                used[held[position]] = length
            else:
                offset = slot - base
                assert 0 <= offset < LRU and offset not in touched, "victim"
                touched.add(offset)
                evicted.add(offset)
                loads.append((int(self.req_to_token[self.row[window], position]), slot))
        spared = [before[o] for o in range(LRU) if o not in touched]
        assert not evicted or not spared or min(before[o] for o in evicted) >= max(spared), "age"
        for position in [p for p, o in held.items() if o in evicted]:
            del held[position]
        for position, slot in zip(entries, got):
            if 0 <= position < first_in_ring:
                held[position] = slot - base
                used[slot - base] = length
        return loads

    def compare_tables(self):
        for window in range(WINDOWS):
            for layer in range(LAYERS):
                table = self.lru.position_at_offset[layer, window].tolist()
                resident = sorted((p, o) for o, p in enumerate(table) if p >= 0)
                assert resident == sorted(self.held[window][layer].items() if window in self.held else ()), "resident"

    def run(self, steps):
        for _ in range(steps):
            if len(self.seq_len) < WINDOWS and self.rng.random() < 0.4:
                self.admit()
            elif self.seq_len and self.rng.random() < 0.1:
                self.release()
            self.step()
            self.compare_tables()


class TestSimulation(CustomTestCase):
    def test_steps(self):
        for seed in range(3):
            Simulation(seed=seed).run(60)

    def test_empty_slots_are_older_than_any_row(self):
        """In every layer, whatever the former owner left, and whatever the length: stamps have 16 bits."""
        for first in (1, 40000, 70000):
            lru = lru_cache.LRUCacheState(LAYERS, WINDOWS, LRU, RING, DEVICE)
            lru.last_used.fill_(77)
            lru.begin_windows(
                torch.tensor([2, 0], device=DEVICE), torch.tensor([first, first], device=DEVICE)
            )
            ages = (first + 1 - lru.last_used[:, [0, 2]].int()) % 65536
            self.assertTrue((ages == lru.EMPTY_AGE).all())
            self.assertTrue((lru.last_used[:, 1] == 77).all())

    def test_bytes_of_a_window(self):
        one, two = (
            lru_cache.LRUCacheState(LAYERS, n, LRU, RING, DEVICE) for n in (1, 2)
        )
        size = [sum(t.nbytes for t in vars(s).values() if isinstance(t, torch.Tensor)) for s in (one, two)]
        counted = lru_cache.LRUCacheState.bytes_per_window(LAYERS, LRU)
        self.assertEqual(size[1] - size[0], counted)

    def test_bytes_of_a_queue(self):
        def size(*args):
            return sum(tensor.nbytes for tensor in kernels.MissQueue(*args, DEVICE).tensors())

        queue, base = kernels.MissQueue, size(4, 64, 3200)
        self.assertEqual(size(5, 64, 3200) - base, 64 * queue.BYTES_PER_ENTRY)
        self.assertEqual(size(4, 64, 6400) - base, 3200 * queue.BYTES_PER_HOST_ROW)


class TestFaultsAreSeen(CustomTestCase):
    FAULTS = {
        "layer offset lost in the ages": ("self.last_used[layer]", "self.last_used[0]"),
        "layer offset lost in the residency": ("self.position_at_offset[layer]", "self.position_at_offset[0]"),
        "next owner finds the mapping": ("self.position_at_offset.index_fill_(1, windows, -1)", "pass"),
        "ring of one": ("            self.ring_slots,\n", "            1,\n"),
        "windows overlap": ("self.lru_slots + self.ring_slots,", "self.lru_slots,"),
        "rows of the batch, not of the requests": ("            request_rows,\n            seq_lens", "            batch_windows,\n            seq_lens"),
    }  # fmt: skip

    def test_each(self):
        for name, (old, new) in self.FAULTS.items():
            with self.subTest(name):
                simulation = Simulation(tools.mutated(lru_cache, old, new), seed=5)
                with self.assertRaises((AssertionError, RuntimeError, IndexError)):
                    simulation.run(60)


if __name__ == "__main__":
    unittest.main()
