"""The kernels of decode KV offloading against a slow oracle, bit for bit.

On a GPU where there is one, under Triton's interpreter elsewhere.
"""

import unittest
from inspect import unwrap
from types import SimpleNamespace

import nsa_offload_oracle as oracle  # first: turns on the interpreter
import torch

from sglang.jit_kernel.triton import nsa_kv_offload
from sglang.test.test_utils import CustomTestCase

DEVICE = oracle.DEVICE
NAMES = (
    "resolve_topk",
    "pick_victims",
    "lru_post_process",
    "build_gpu_page_table",
    "map_seq_positions_to_host_slots",
)
# A CPU reference may stand in for the wrappers; here the kernels themselves are meant.
KERNELS = SimpleNamespace(**{name: unwrap(getattr(nsa_kv_offload, name)) for name in NAMES})
NUM_SEEDS = 300 if DEVICE == "cuda" else 42


def compare(kernels, case) -> None:
    expected = oracle.run_case(oracle, case, "cpu")
    with oracle.poisoned_empty():
        oracle.run_case(kernels, case, DEVICE, expected)


class TestAgainstOracle(CustomTestCase):
    def test_random_cases(self):
        for seed in range(NUM_SEEDS):
            with self.subTest(seed=seed):
                compare(KERNELS, oracle.random_case(seed))

    def test_all_hits_and_all_misses(self):
        for seed in range(len(oracle.SHAPES)):
            for residency, place in (("all", 0), ("none", 2)):
                with self.subTest(seed=seed, residency=residency):
                    case = oracle.random_case(seed, residency=residency)
                    entries = int((case.topk >= 0).sum())
                    compare(KERNELS, case)
                    added = oracle.run_case(KERNELS, case, DEVICE)["counters"]
                    added = (added - case.counters).tolist()
                    self.assertEqual(added[place], entries)
                    self.assertEqual(sum(added), entries)

    def test_serving_shape(self):
        """Top-k 2048 over a window of 4096, as DeepSeek-V3.2 has by default."""
        shapes = oracle.SHAPES
        oracle.SHAPES = ((2048, 4096, 64, 9000), (2048, 2048, 64, 5000))
        try:
            for seed in range(2):
                compare(KERNELS, oracle.random_case(seed, batch=2))
        finally:
            oracle.SHAPES = shapes

    def test_only_padding(self):
        case = oracle.random_case(2)
        case.batch_windows.fill_(-1)
        compare(KERNELS, case)
        result = oracle.run_case(KERNELS, case, DEVICE)
        self.assertEqual(result["counters"].tolist(), case.counters.tolist())
        wanted = case.topk >= 0
        self.assertTrue((result["page_table"][wanted] == 0).all())
        self.assertTrue((result["page_table"][~wanted] == -1).all())
        self.assertTrue((result["targets"] == -1).all())

    def test_no_entries(self):
        case = oracle.random_case(0)
        case.topk.fill_(-1)
        compare(KERNELS, case)
        self.assertTrue((oracle.run_case(KERNELS, case, DEVICE)["page_table"] == -1).all())

    def test_zero_rows(self):
        case = oracle.random_case(0)
        for name in ("topk", "batch_windows", "seq_lens", "batch_rows"):
            setattr(case, name, getattr(case, name)[:0])
        compare(KERNELS, case)

    def test_int32_sequence_lengths(self):
        """A replayed CUDA graph has int32 lengths, an eager batch int64."""
        case = oracle.random_case(5)
        case.seq_lens = case.seq_lens.int()
        compare(KERNELS, case)

    def test_request_row_table_with_a_stride(self):
        case = oracle.random_case(1)
        positions, rows = case.topk.to(DEVICE), case.batch_rows.to(DEVICE)
        wide = torch.randint(0, 999, (9, 333), dtype=torch.int32)
        got = KERNELS.map_seq_positions_to_host_slots(
            positions, rows, wide.to(DEVICE)[:, : case.req_to_token.shape[1]]
        )
        expected = oracle.map_seq_positions_to_host_slots(case.topk, case.batch_rows, wide)
        self.assertTrue(torch.equal(got.cpu(), expected))


class TestRing(CustomTestCase):
    """Which of the newest rows are read from the ring."""

    def resolve(self, topk, seq_len, ring_begin, ring_slots=4, lru_slots=8):
        def tensor(values, dtype=torch.int32):
            return torch.tensor(values, dtype=dtype, device=DEVICE)

        tables = torch.full((1, 100), -1, dtype=torch.int16, device=DEVICE)
        marks = torch.zeros((1, lru_slots), dtype=torch.uint8, device=DEVICE)
        offsets, _, misses, counts = KERNELS.resolve_topk(
            tensor([topk]),
            tensor([0]),
            tensor([seq_len]),
            tensor([ring_begin]),
            tables,
            marks,
            tensor([0, 0, 0], torch.int64),
            lru_slots,
            ring_slots,
        )
        return offsets.tolist()[0], misses.tolist()[0][: int(counts[0])]

    def test_full_ring_holds_the_newest_rows_only(self):
        offsets, misses = self.resolve([45, 46, 47, 48, 49], seq_len=50, ring_begin=10)
        self.assertEqual(offsets, [-1, 8 + 2, 8 + 3, 8 + 0, 8 + 1])
        self.assertEqual(misses, [45])

    def test_first_step_after_a_prompt_finds_its_own_row_only(self):
        offsets, misses = self.resolve([47, 48, 49], seq_len=50, ring_begin=49)
        self.assertEqual(offsets, [-1, -1, 8 + 1])
        self.assertEqual(misses, [47, 48])

    def test_ring_begins_in_the_middle(self):
        offsets, misses = self.resolve([46, 47, 48, 49], seq_len=50, ring_begin=48)
        self.assertEqual(offsets, [-1, -1, 8 + 0, 8 + 1])
        self.assertEqual(misses, [46, 47])

    def test_sequence_of_one_token(self):
        self.assertEqual(self.resolve([0, -1], 1, ring_begin=0), ([8, -1], []))

    def test_sequence_shorter_than_the_ring(self):
        offsets, misses = self.resolve([2, 0, 1, -1], 3, ring_begin=1)
        self.assertEqual(offsets, [8 + 2, -1, 8 + 1, -1])
        self.assertEqual(misses, [0])

    def test_ring_of_one_slot(self):
        offsets, misses = self.resolve([48, 49], 50, ring_begin=10, ring_slots=1)
        self.assertEqual(offsets, [-1, 8])
        self.assertEqual(misses, [48])


class TestDuplicates(CustomTestCase):
    """Top-k has no duplicates; ties in an indexer must still not read another row.

    Equal hits share their slot. Equal misses get a slot each, both are loaded, and the next
    step finds one of the two.
    """

    def test_duplicates_read_their_own_row(self):
        case = oracle.random_case(2, batch=1)
        case.batch_windows[0], case.ring_begin[:], case.seq_lens[:] = 1, 400, 400
        case.topk[:] = -1
        case.topk[0, :6] = torch.tensor([7, 9, 7, 9, 9, 11])
        case.offset_of_position[1] = -1
        case.position_at_offset[1] = -1
        case.offset_of_position[1, 7], case.position_at_offset[1, 50] = 50, 7
        result = oracle.run_case(KERNELS, case, DEVICE)
        base = 64 + case.lru_slots + case.ring_slots
        table = (result["page_table"][0, :6] - base).tolist()
        self.assertEqual([table[0], table[2]], [50, 50])
        self.assertEqual(len({table[1], table[3], table[4], table[5], 50}), 5)
        self.assertEqual(result["misses"][0, :4].tolist(), [9, 9, 9, 11])
        loaded = (result["targets"][0, :4] - base).tolist()
        self.assertEqual(loaded, [table[1], table[3], table[4], table[5]])
        self.assertIn(int(result["offset_of_position"][1, 9]), loaded[:3])
        self.assertEqual(sorted(result["lru_order"][1].tolist()), list(range(192)))


class TestLargeTables(CustomTestCase):
    """Element numbers above 2^31. Untouched pages of the tables take no memory on a CPU."""

    def check_window(self, windows: int, lru_slots: int, context: int):
        window, k = windows - 1, 8
        try:
            # Unset pages of a fresh mapping are zeros; only the last window is read.
            table = torch.empty((windows, context), dtype=torch.int16, device=DEVICE)
            order = torch.empty((windows, lru_slots), dtype=torch.int16, device=DEVICE)
            marks = torch.empty((windows, lru_slots), dtype=torch.uint8, device=DEVICE)
            held = torch.empty((windows, lru_slots), dtype=torch.int32, device=DEVICE)
        except RuntimeError as error:
            self.skipTest(f"no memory for the tables: {error}")
        table[window], held[window], marks[window] = -1, -1, 0
        order[window] = torch.arange(lru_slots - 1, -1, -1, dtype=torch.int16)
        table[window, 5], held[window, lru_slots - 1] = lru_slots - 1, 5
        case = SimpleNamespace(
            k=k,
            lru_slots=lru_slots,
            ring_slots=64,
            topk=torch.tensor([[5, 9, -1, 3, context - 65, -1, -1, -1]], dtype=torch.int32),
        )

        def tensor(values, dtype=torch.int32):
            return torch.tensor(values, dtype=dtype, device=DEVICE)

        row = tensor([window])
        ring_begin = tensor([context]).expand(windows)
        topk = case.topk.to(DEVICE)
        counters = tensor([0, 0, 0], torch.int64)
        offsets, ranks, misses, counts = KERNELS.resolve_topk(
            topk, row, tensor([context]), ring_begin.contiguous(), table, marks, counters, lru_slots, 64
        )
        victims = KERNELS.pick_victims(row, counts, order, marks, k)
        KERNELS.lru_post_process(row, counts, misses, victims, order, marks, held, table)
        last = lru_slots - 1
        self.assertEqual(counters.tolist(), [1, 0, 3])
        self.assertEqual(offsets.tolist()[0][0], last)
        self.assertEqual(misses.tolist()[0][:3], [9, 3, context - 65])
        self.assertEqual(victims.tolist()[0][:4], [last - 1, last - 2, last - 3, -1])
        self.assertEqual(table[window, [5, 9, 3]].tolist(), [last, last - 1, last - 2])
        self.assertEqual(held[window, last - 3].item(), context - 65)
        self.assertEqual(
            order[window, -4:].tolist(), [last, last - 1, last - 2, last - 3]
        )
        self.assertFalse(marks[window].any().item())

    def test_positions(self):
        context = 1 << 17
        self.check_window((1 << 31) // context + 2, lru_slots=64, context=context)

    def test_window_offsets(self):
        lru_slots = 1 << 14
        self.check_window((1 << 31) // lru_slots + 2, lru_slots, context=256)

    def test_request_rows(self):
        context = 1 << 20
        rows = (1 << 31) // context + 2
        try:
            table = torch.empty((rows, context), dtype=torch.int32, device=DEVICE)
        except RuntimeError as error:
            self.skipTest(f"no memory for the table: {error}")
        table[rows - 1, context - 1] = 77
        got = KERNELS.map_seq_positions_to_host_slots(
            torch.tensor([[-1, context - 1]], dtype=torch.int32, device=DEVICE),
            torch.tensor([rows - 1], dtype=torch.int32, device=DEVICE),
            table,
        )
        self.assertEqual(got.tolist(), [[-1, 77]])


class TestFaultsAreSeen(CustomTestCase):
    """Each fault that kernels of this kind have had, put back, fails the comparison above."""

    FAULTS = {
        "-1 becomes position 0": ("    wanted = position >= 0", "    position = tl.maximum(position, 0)\n    wanted = position >= 0"),
        "padded rows act on window 0": ("position = tl.where(window >= 0, position, -1)", ""),
        "ring ignores where decoding began": ("tl.maximum(ring_begin, seq_len - ring_slots)", "tl.maximum(0, seq_len - ring_slots)"),
        "ring holds one row more": ("seq_len - ring_slots)", "seq_len - ring_slots - 1)"),
        "ring of one": ("lru_slots + position % ring_slots", "lru_slots + position * 0"),
        "hits are not marked": ("tl.full([BLOCK_K], 1, tl.uint8)", "tl.full([BLOCK_K], 0, tl.uint8)"),
        "unused miss positions undefined": ("mask=in_row & (cols >= count),", "mask=in_row & (cols >= count) & (cols < 0),"),
        "unused victims undefined": ("mask=(cols < K) & (cols >= count),", "mask=(cols < K) & (cols >= count) & (cols < 0),"),
        "one victim for two misses": ("victim_offsets_ptr + row * K + rank, offset,", "victim_offsets_ptr + row * K + rank // 2 * 2, offset,"),
        "newest evicted": ("rank = tl.cumsum(free, 0) - free\n", "rank = tl.sum(free, 0) - tl.cumsum(free, 0)\n"),
        "hits can be evicted": ("free = (live & (touched == 0)).to(tl.int32)\n    rank", "free = live.to(tl.int32)\n    rank"),
        "evicted position keeps its offset": ("mask=held & (current == victim)", "mask=held & (current != victim)"),
        "new position not entered": ("tl.store(offsets_of + new, victim.to(tl.int16), mask=loaded)", ""),
        "reverse table not updated": ("tl.store(positions_at + victim, new, mask=loaded)", ""),
        "marks not cleared": ("tl.store(touches + slots, tl.full([BLOCK_W], 0, tl.uint8), mask=live)", ""),
        "order of hits not renewed": ("tl.store(order + place, offset, mask=live)", ""),
        "new rows become the oldest": ("lru_slots - count + free_rank,\n", "free_rank,\n"),
        "window 0 for every request": ("base = first_window_slot + window * window_slots", "base = first_window_slot + window * 0"),
        "miss maps to its rank's slot": ("offset = tl.where(rank >= 0, victim_of_rank, offset)", "offset = tl.where(rank >= 0, rank, offset)"),
        "-1 maps to a real slot": ("tl.where(position >= 0, unresolved, -1)", "tl.where(position >= 0, unresolved, 0)"),
        "host slots of another request": ("request_row * row_stride + position", "row * row_stride + position"),
        "-1 maps to a host slot": ("known = in_row & (position >= 0)", "position = tl.maximum(position, 0)\n    known = in_row"),
    }  # fmt: skip

    def test_each(self):
        for name, (old, new) in self.FAULTS.items():
            with self.subTest(name):
                faulty = oracle.mutated(nsa_kv_offload, old, new)
                with self.assertRaises(AssertionError):
                    for seed in range(len(oracle.SHAPES)):
                        compare(faulty, oracle.random_case(seed))


if __name__ == "__main__":
    unittest.main()
