"""The kernels of decode KV offloading against plain Python, bit for bit.

On a GPU where there is one; elsewhere their source runs on the CPU, where that is installed.
"""

import faulthandler
import os
import shutil
import signal
import tempfile
import time
import unittest
from contextlib import nullcontext
from types import SimpleNamespace
from unittest import mock

import nsa_swap_oracle as oracle
import torch

from sglang.jit_kernel import nsa_kv_offload as kernels
from sglang.jit_kernel.utils import KERNEL_PATH
from sglang.test.test_utils import CustomTestCase

ON_GPU = torch.cuda.is_available()
DEVICE = "cuda" if ON_GPU else "cpu"
SOURCES = KERNEL_PATH / "csrc" / "nsa_kv_offload"
ROW_BYTES = (656, 1152)
NUM_SEEDS = 120 if ON_GPU else 42
TABLES = ("position_at_offset", "last_used", "counters", "page_table")

try:
    from sgl_cpu_ref import nsa_swap as on_cpu
except ImportError:
    on_cpu = None
if shutil.which("g++") is None:
    on_cpu = None
if on_cpu is not None:
    torch.set_num_threads(1)  # a forked process has no other threads


def run_on_cpu(order="forward", seed=0, sources=SOURCES):
    """While open, the kernels' source runs on the CPU, its threads in the given order."""
    made = on_cpu.Kernels(sources, order, seed)
    return mock.patch.multiple(
        kernels,
        _swap_module=made.swap_module,
        _gather_module=made.gather_module,
        _store_module=made.store_module,
    )


def run_swap(case):
    """One swap on copies of a case: every tensor by name, the queue, the loads."""
    t = SimpleNamespace(
        **{name: v.to(DEVICE, copy=True) for name, v in vars(case).items() if isinstance(v, torch.Tensor)}
    )
    t.queue = kernels.MissQueue(len(t.topk), case.k, case.num_host_rows, DEVICE)
    t.page_table = kernels.swap_topk(
        t.topk,
        t.batch_windows,
        t.request_rows,
        t.seq_lens,
        t.ring_begin,
        t.req_to_token[:, : case.context],
        t.position_at_offset,
        t.last_used,
        t.counters,
        t.queue,
        case.lasting,
        case.ring_slots,
        oracle.RING_WINDOW_BASE,
        case.window_slots,
    )
    return t


def run_gather(t, case, ordered, row_bytes=656, blocks=5):
    """Gather into noise; returns the host rows, and the device rows before and after."""
    num_device_rows = oracle.RING_WINDOW_BASE + len(case.ring_begin) * case.window_slots
    host = torch.randint(0, 256, (case.num_host_rows, row_bytes), dtype=torch.uint8)
    before = torch.randint(0, 256, (num_device_rows, row_bytes), dtype=torch.uint8)
    device = before.to(DEVICE, copy=True)
    t.queue.order_min_rows = 0 if ordered else 1 << 20
    kernels.gather_misses(host.pin_memory() if ON_GPU else host, device, t.queue, blocks)
    return host, before, device.cpu()


class TestSwap(CustomTestCase):
    def setUp(self):
        if not ON_GPU and on_cpu is None:
            self.skipTest("needs a GPU, or the kernels' source on the CPU")

    def modes(self):
        """Row order of the queue, and where the kernels run."""
        orders = [None] if ON_GPU else ["forward", "backward", "chance"]
        return [(ordered, order) for ordered in (False, True) for order in orders]

    def on(self, order, seed=0):
        return nullcontext() if ON_GPU else run_on_cpu(order, seed)

    def compare(self, case, ordered, order, row_bytes=656, seed=0):
        expected = oracle.swap(case)
        with self.on(order, seed):
            t = run_swap(case)
            for name in TABLES:
                got, want = getattr(t, name).cpu(), getattr(expected, name)
                self.assertEqual(got.dtype, want.dtype, name)
                self.assertTrue(torch.equal(got, want), f"{name}:\n{got}\nnot\n{want}")
            self.check_queue(t, expected)
            host, before, after = run_gather(t, case, ordered, row_bytes)
        for host_slot, device_slot in expected.loads:
            before[device_slot] = host[host_slot]
        self.assertTrue(torch.equal(after, before), "rows")
        self.assertFalse(t.queue.state.any())
        self.assertFalse(t.queue.wanted.any())

    def check_queue(self, t, expected):
        misses, again = t.queue.state.tolist()[:2]
        middle = len(t.queue.host_slots) // 2

        def listed(begin, count):
            slots = (t.queue.host_slots, t.queue.device_slots)
            return list(zip(*(part[begin : begin + count].tolist() for part in slots)))

        self.assertEqual(sorted(listed(0, misses)), sorted(expected.loads))
        bits = t.queue.wanted.cpu().numpy().view("uint8")
        wanted = [8 * i + bit for i, byte in enumerate(bits) for bit in range(8) if byte >> bit & 1]
        self.assertEqual(wanted, sorted({slot for slot, _ in expected.loads}))
        loads = [(slot, int(t.queue.target[slot])) for slot in wanted] + listed(middle, again)
        self.assertEqual(sorted(loads), sorted(expected.loads))

    def test_positions_that_share_a_place(self):
        """Several turns: positions whole tables apart, some in the window and some not."""
        places = kernels.SWAP_TABLE_PLACES if ON_GPU else on_cpu.TABLE_PLACES
        for seed in range(12):
            for ordered, order in self.modes():
                with self.subTest(seed=seed, order=order, ordered=ordered):
                    case = oracle.random_case(seed, shape=(64, 128, 5, 5 * places + 9), apart=places)
                    self.compare(case, ordered, order, ROW_BYTES[seed % 2], seed)
                    self.check_duplicates(seed, ordered, order, shape=(64, 128, 5, 5 * places + 9), apart=places)

    def test_a_window_of_no_multiple_of_four_is_refused(self):
        case = oracle.random_case(0, shape=(7, 10, 5, 64))
        with self.on("forward"), self.assertRaisesRegex(RuntimeError, "10 LRU slots are no multiple of 4"):
            run_swap(case)

    def test_random_cases(self):
        for seed in range(NUM_SEEDS):
            modes = self.modes()
            ordered, order = modes[seed // len(oracle.SHAPES) % len(modes)]
            with self.subTest(seed=seed, ordered=ordered, order=order):
                case = oracle.random_case(seed, stale=seed % 3 == 0)
                self.compare(case, ordered, order, ROW_BYTES[seed % 2], seed)

    def test_serving_shapes(self):
        """Top-k 2048 over windows of DeepSeek-V3.2's default, the least and a large size; five lists at once."""
        shapes = [(2048, 4096, 20000), (2048, 2048, 20000), (2048, 16384, 20000)]
        if ON_GPU:  # a block of the CPU's has fewer threads, and fewer places for positions
            shapes += [(10240, 10240, 20000), (2048, 4096, 160000)]
        for entries, lru_slots, context in shapes:
            for ordered in (False, True):
                case = oracle.random_case(lru_slots, 2, (entries, lru_slots, 64, context))
                self.compare(case, ordered, "chance")

    def compare_gather(self, num_host_rows, density, order, seed=0, row_bytes=656):
        """A queue that no swap filled: any density of wanted rows, and some listed ones."""
        generator = torch.Generator().manual_seed(seed)
        slots = (torch.rand(num_host_rows, generator=generator) < density).nonzero().flatten()
        listed = slots[:: len(slots) // 20 + 1]
        targets = torch.randperm(len(slots) + len(listed), generator=generator).int() + 1
        queue = kernels.MissQueue(1, len(slots) + len(listed), num_host_rows, DEVICE, order_min_rows=0)
        bits = torch.zeros(len(queue.wanted) * 32, dtype=torch.int64)
        bits[slots] = 1
        words = (bits.view(-1, 32) << torch.arange(32)).sum(1)
        queue.wanted.copy_((words - (words >> 31 << 32)).int())
        queue.target[slots.to(DEVICE)] = targets[: len(slots)].to(DEVICE)
        again = len(queue.host_slots) // 2
        queue.host_slots[again : again + len(listed)] = listed.int().to(DEVICE)
        queue.device_slots[again : again + len(listed)] = targets[len(slots) :].to(DEVICE)
        queue.state[:2] = torch.tensor([len(targets), len(listed)], device=DEVICE)
        host = torch.randint(0, 256, (num_host_rows, row_bytes), dtype=torch.uint8)
        before = torch.randint(0, 256, (len(targets) + 2, row_bytes), dtype=torch.uint8)
        device = before.to(DEVICE, copy=True)
        with self.on(order, seed):
            kernels.gather_misses(host.pin_memory() if ON_GPU else host, device, queue)
        before[targets.long()] = host[torch.cat([slots, listed])]
        self.assertTrue(torch.equal(device.cpu(), before), "rows")
        self.assertFalse(queue.state.any())
        self.assertFalse(queue.wanted.any())

    def test_gather_of_any_density(self):
        """More rows than a block lists at a time, more chunks than blocks, and single rows far apart."""
        for num_host_rows, density in ((5000, 0.8), (17001, 0.03), (40000, 0.0005)):
            for order in dict.fromkeys(order for _, order in self.modes()):
                with self.subTest(num_host_rows=num_host_rows, order=order):
                    self.compare_gather(num_host_rows * (16 if ON_GPU else 1), density, order)

    def compare_store(self, num_layers, host_slots, order, row_bytes=656):
        """Every byte of both pools, the rows that are not copied too."""
        generator = torch.Generator().manual_seed(len(host_slots))
        num_rows = len(host_slots) + 200

        def rows():
            return torch.randint(0, 256, (num_layers, num_rows, row_bytes), dtype=torch.uint8, generator=generator)

        def addresses(layers):
            return torch.tensor([layer.data_ptr() for layer in layers], dtype=torch.uint64, device=DEVICE)

        device, host = rows().to(DEVICE), rows()
        host = host.pin_memory() if ON_GPU else host
        # As pages lie: runs that begin anywhere.
        device_slots = torch.arange(len(host_slots)) * 65 // 64 + 3
        before, expected = device.clone(), host.clone()
        expected[:, host_slots] = device[:, device_slots.to(DEVICE)].cpu()
        with self.on(order):
            kernels.store_rows(
                *(addresses(device), addresses(host), device_slots.to(DEVICE), host_slots.to(DEVICE), row_bytes)
            )
            if ON_GPU:
                torch.cuda.synchronize()
        self.assertTrue(torch.equal(host, expected), "host rows")
        self.assertTrue(torch.equal(device, before), "device rows")

    def test_store(self):
        """No row, one, tiles that are full or not, more tiles than blocks; runs of rows and scattered ones."""
        for num_layers, count in ((1, 0), (3, 1), (1, 64), (3, 65), (2, 700 if ON_GPU else 200), (61, 128)):
            for order in dict.fromkeys(order for _, order in self.modes()):
                for row_bytes in ROW_BYTES:
                    with self.subTest(layers=num_layers, rows=count, order=order, row_bytes=row_bytes):
                        scattered = torch.randperm(count + 150, generator=torch.Generator().manual_seed(count))[:count]
                        self.compare_store(num_layers, scattered, order, row_bytes)
                        self.compare_store(num_layers, torch.arange(count) + 7, order, row_bytes)

    def test_duplicates_share_a_slot_and_a_load(self):
        for seed in range(12):
            for ordered, order in self.modes():
                with self.subTest(seed=seed, order=order, ordered=ordered):
                    self.check_duplicates(seed, ordered, order)

    def check_duplicates(self, seed, ordered, order, **kwargs):
        case = oracle.random_case(seed, duplicates=True, **kwargs)
        expected = oracle.swap(case)
        with self.on(order, seed):
            t = run_swap(case)
            # Which of two entries speaks decides the ranks, hence which victim it gets.
            self.assertEqual(t.counters.tolist(), expected.counters.tolist())
            self.assertEqual(int(t.queue.state[0]), len(expected.loads))
            self.check_tables(t)
            host, _, after = run_gather(t, case, ordered)
        for b, window in enumerate(case.batch_windows.tolist()):
            if window < 0:
                continue
            self.check_row(t, case, b, window)
            self.check_uses(t, case, b, window)
            held = oracle.offsets(case.position_at_offset[window])
            for position, slot in zip(case.topk[b].tolist(), t.page_table[b].tolist()):
                first_in_ring = max(int(case.ring_begin[window]), int(case.seq_lens[b]) - case.ring_slots)
                if 0 <= position < first_in_ring and position not in held:
                    host_slot = int(case.req_to_token[case.request_rows[b], position])
                    self.assertTrue(torch.equal(after[slot], host[host_slot]), (b, position))

    def test_launches_that_follow_each_other(self):
        """Nothing is read between swap and gather, nor between layers; on a GPU in one CUDA graph."""
        batch, k, lru, context, steps = (96, 2048, 4096, 12000, 40) if ON_GPU else (4, 64, 128, 700, 8)
        layers, windows = 2, batch
        generator = torch.Generator().manual_seed(0)

        def on(tensor):
            return tensor.to(DEVICE)

        rows, num_host_rows = torch.arange(batch).int(), batch * context
        req_to_token = torch.randperm(num_host_rows, generator=generator).view(batch, context).int()
        host = torch.zeros((layers, num_host_rows, 656), dtype=torch.uint8)
        host.view(torch.int64)[:, :, 0] = torch.arange(layers * num_host_rows).view(layers, -1) + 1
        host = host.pin_memory() if ON_GPU else host
        slots = oracle.RING_WINDOW_BASE + windows * (lru + 64)
        device = on(torch.zeros((layers, slots, 656), dtype=torch.uint8))
        positions = on(torch.full((layers, windows, lru), -1, dtype=torch.int32))
        last_used = on(torch.zeros((layers, windows, lru), dtype=torch.int16))
        counters, ring_begin = on(torch.zeros((layers, 3), dtype=torch.int64)), on(torch.full((windows,), context).int())
        topk, lens = on(torch.zeros((layers, batch, k), dtype=torch.int32)), on(torch.full((batch,), 1).int())
        rows, req_to_token_there = on(rows), on(req_to_token)
        queue = kernels.MissQueue(batch, k, num_host_rows, DEVICE)
        tables = [None] * layers

        def forward():
            for layer in range(layers):
                tables[layer] = kernels.swap_topk(
                    *(topk[layer], rows, rows, lens, ring_begin, req_to_token_there),
                    *(positions[layer], last_used[layer], counters[layer], queue),
                    *(k, 64, oracle.RING_WINDOW_BASE, lru + 64),
                )
                kernels.gather_misses(host[layer], device[layer], queue)

        for order_min_rows in (0, 1 << 30):
            queue.order_min_rows = order_min_rows
            with self.on("chance"):
                topk.fill_(-1)
                forward()  # compiles
                replay = forward
                if ON_GPU:
                    graph = torch.cuda.CUDAGraph()
                    with torch.cuda.graph(graph):
                        forward()
                    replay = graph.replay
                for step in range(steps):
                    chosen = torch.rand((layers, batch, context - 70), generator=generator).argsort(-1)[..., :k].int()
                    topk.copy_(chosen)
                    lens.fill_(context - steps + step)
                    replay()
                    for layer in range(layers):
                        host_slots = torch.gather(req_to_token, 1, chosen[layer].long()).flatten().long()
                        got = device[layer].view(torch.int64)[tables[layer].flatten().long(), 0].cpu()
                        self.assertTrue(torch.equal(got, host[layer].view(torch.int64)[host_slots, 0]), (step, layer))
        self.assertFalse(queue.state.any())
        self.assertFalse(queue.wanted.any())

    def check_tables(self, t):
        for held in t.position_at_offset:
            oracle.offsets(held)

    def check_row(self, t, case, b, window):
        base = oracle.RING_WINDOW_BASE + window * case.window_slots
        first_in_ring = max(int(case.ring_begin[window]), int(case.seq_lens[b]) - case.ring_slots)
        offset_of = oracle.offsets(t.position_at_offset[window])
        for position, slot in zip(case.topk[b].tolist(), t.page_table[b].tolist()):
            if 0 <= position < first_in_ring:
                self.assertEqual(slot, base + offset_of[position])

    def check_uses(self, t, case, b, window):
        """Only entries that last make a slot young, whichever of several entries loaded it."""
        topk, seq_len = case.topk[b].tolist(), int(case.seq_lens[b])
        first_in_ring = max(int(case.ring_begin[window]), seq_len - case.ring_slots)
        before, offset_of = (oracle.offsets(c.position_at_offset[window]) for c in (case, t))
        for position in {p for p in topk if 0 <= p < first_in_ring}:
            offset = offset_of[position]
            if position in topk[: case.lasting]:
                expected = seq_len
            elif position not in before:
                expected = seq_len - 16384
            else:
                expected = int(case.last_used[window, offset])
            self.assertEqual((int(t.last_used[window, offset]) - expected) % 65536, 0, (b, position))

    @unittest.skipIf(on_cpu is None, "needs the kernels' source on the CPU")
    def test_shared_memory(self):
        """Python counts what the source takes."""
        for entries, lru_slots in ((7, 8), (2048, 4096), (5 * 2048, kernels.MAX_WINDOW_SLOTS)):
            held = on_cpu.Kernels(SOURCES).shared_bytes(entries, lru_slots)
            held += 2 * (kernels.SWAP_TABLE_PLACES - on_cpu.TABLE_PLACES)
            self.assertEqual(held, kernels.swap_shared_bytes(entries, lru_slots))
        self.assertLessEqual(held, kernels.MAX_SHARED_BYTES)

    def test_only_padding_and_no_rows(self):
        for rows in (4, 0):
            case = oracle.random_case(2)
            case.batch_windows.fill_(-1)
            for name in ("topk", "batch_windows", "seq_lens", "request_rows"):
                setattr(case, name, getattr(case, name)[:rows])
            for ordered, order in self.modes():
                self.compare(case, ordered, order)

    def test_steps_keep_what_was_used_last(self):
        """Over many steps a victim is never younger than an untouched slot that stays."""
        case = oracle.random_case(4, 2, (24, 60, 4, 400))
        case.ring_begin.fill_(0)
        queue = kernels.MissQueue(2, 24, case.num_host_rows, DEVICE)
        t = SimpleNamespace(**{n: v.to(DEVICE) for n, v in vars(case).items() if isinstance(v, torch.Tensor)})
        with self.on("chance", 1):
            for step in range(60):
                t.seq_lens = torch.tensor([200 + step, 300 + step], dtype=torch.int32, device=DEVICE)
                t.topk = torch.stack([torch.randperm(n)[:24] for n in (90, 196)]).int().to(DEVICE)
                before = t.last_used.clone(), t.position_at_offset.clone()
                kernels.swap_topk(
                    *(t.topk, t.batch_windows, t.request_rows, t.seq_lens, t.ring_begin, t.req_to_token),
                    *(t.position_at_offset, t.last_used, t.counters, queue),
                    *(24, 4, oracle.RING_WINDOW_BASE, case.window_slots),
                )
                queue.state.zero_()
                queue.wanted.zero_()
                for b, window in enumerate(case.batch_windows.tolist()):
                    ages = (int(t.seq_lens[b]) - before[0][window].int()) % 65536
                    buckets = torch.tensor([oracle.age_bucket(age) for age in ages.tolist()])
                    changed = (t.position_at_offset[window] != before[1][window]).cpu()
                    kept = (t.last_used[window] == before[0][window]).cpu() & ~changed
                    if changed.any() and kept.any():
                        self.assertGreaterEqual(int(buckets[changed].min()), int(buckets[kept].max()))
            self.check_tables(t)


@unittest.skipIf(on_cpu is None or ON_GPU, "needs the kernels' source on the CPU")
class TestFaults(CustomTestCase):
    """Each fault in the kernels' source must change a result, in some order of the threads."""

    FAULTS = {
        "padding owns a window": ("swap.cuh", "if (window < 0) {", "if (window < -1) {"),
        "ring taken for older rows": ("swap.cuh", "= ring_begin > seq_len - params.ring_slots ?", "= true ?"),
        "ring before the window's own rows": ("swap.cuh", "= ring_begin > seq_len - params.ring_slots ?", "= false ?"),
        "a hit is evicted": ("swap.cuh", "marks |= static_cast<uint32_t>(entry < lasting ? kUsed : kTouched) << 8 * i;", ""),
        "a hit stays old": ("swap.cuh", "  own_slots.renew_used(now);\n", ""),
        "stamps beside a used one lost": ("swap.cuh", "renewed.x = (renewed.x & ~low) | (both & low);", "renewed.x = both;"),
        "later stamps of a word lost": ("swap.cuh", "renewed.y = (renewed.y & ~high) | (both & high);", ""),
        "offsets of the block before": ("swap.cuh", "    arrays.entry_offsets[first_entry + e] = kAbsent;\n", ""),
        "marks of the block before": ("swap.cuh", "for (int word = first; word < end; ++word) words[word] = 0;", ""),
        "a load stays old": ("swap.cuh", "params.lasting ? now :", "0 ? now :"),
        "a draft's hit is a use": ("swap.cuh", "entry < lasting ? kUsed : kTouched", "kUsed"),
        "a draft speaks for one that lasts": ("swap.cuh", "if (first_entry + e < params.lasting && (waiting >> e & 1))", "if (false)"),
        "no barrier after the drafts' entries": ("swap.cuh", "if (has_drafts) {\n      __syncthreads();", "if (has_drafts) {"),
        "a draft's load is a use": ("swap.cuh", "static_cast<uint16_t>(now - kDraftAge)", "now"),
        "youngest first": ("swap.cuh", "if (bucket < boundary ||", "if (bucket > boundary ||"),
        "new position not entered": ("swap.cuh", "position_at[offset] = positions[e];", ""),
        "host slot of another row": ("swap.cuh", "params.request_rows[row] * params.row_stride", "row * params.row_stride"),
        "ranks off by one": ("swap.cuh", "rank = misses.before,", "rank = misses.before > 0 ? misses.before - 1 : 0,"),
        "ring of another size": ("swap.cuh", "positions[e] % params.ring_slots", "positions[e] % (params.ring_slots + 1)"),
        "no barrier before the victims": (
            "swap.cuh",
            "shared.queued_before = queued_before;\n  __syncthreads();",
            "shared.queued_before = queued_before;\n",
        ),
        "no barrier before the counts": ("swap.cuh", "any_missed = __syncthreads_or(missed != 0);", "any_missed = true;"),
        "no barrier before the queue is emptied": (
            "gather.cuh",
            "  __syncthreads();  // every thread of this block has read the state\n",
            "",
        ),
        "no barrier in the scan": ("scan.cuh", "sums[warp] = upto;\n  __syncthreads();", "sums[warp] = upto;\n"),
        "no barrier after the entries": ("swap.cuh", "    __syncthreads();\n#pragma unroll\n    for (int e = 0; e < kThreadEntries; ++e) {\n      if (!(waiting", "#pragma unroll\n    for (int e = 0; e < kThreadEntries; ++e) {\n      if (!(waiting"),
        "one turn for all": ("swap.cuh", "if (!__syncthreads_or(waiting != 0)) break;", "__syncthreads();\n    break;"),
        "entry of another position": ("swap.cuh", "|| arrays.entry_positions[entry] != position", ""),
        "speaker of another position": ("swap.cuh", "if (arrays.entry_positions[speakers[e]] == positions[e]) waiting", "waiting"),
        "no barrier in the sum": ("scan.cuh", "= of_own_warp;\n  __syncthreads();", "= of_own_warp;\n"),
        "a sum overwritten": ("swap.cuh", "shared.search_sums[half]", "shared.search_sums[0]"),
        "boundary off by one": ("swap.cuh", "if (count >= need) {", "if (count > need) {"),
        "duplicates load twice": ("swap.cuh", "if (speakers[e] != first_entry + e) {", "if (false) {"),
        "a shared row dropped": (
            "swap.cuh",
            "queue.device_slots[again] = slot;",
            "queue.device_slots[again] = 0;",
        ),
        "a row's end not copied": ("gather.cuh", "(kLineUnits - 1 + kUnits + kWarpSize - 1)", "kUnits"),
        "bits left behind": ("gather.cuh", "if (word != 0) queue.wanted[first_slot / 32] = 0;", ""),
        "a chunk left out": ("gather.cuh", "static_cast<int>(gridDim.x) + atomicAdd", "static_cast<int>(gridDim.x) + 1 + atomicAdd"),
        "last chunk dropped": ("gather.cuh", "(words + kThreads - 1) / kThreads", "words / kThreads"),
        "rows beyond a list dropped": ("gather.cuh", "begin < rows.total; begin", "begin < rows.total && begin == 0; begin"),
        "no barrier after listing": ("gather.cuh", "      }\n      __syncthreads();", "      }"),
        "no barrier before listing again": ("gather.cuh", "if (begin > 0) __syncthreads();", ""),
        "sums overwritten": ("gather.cuh", "shared.scan_sums[turn]", "shared.scan_sums[0]"),
        "next chunk overwritten": ("gather.cuh", "shared.next_chunk[turn ^ 1] = next_chunk", "shared.next_chunk[turn] = next_chunk"),
        "queue not emptied": ("gather.cuh", "queue.state[i] = 0;", ";"),
        "last rows of the list dropped": ("gather.cuh", "first < num_rows; first +=", "first + share <= num_rows - 1; first +="),
        "rows wanted again forgotten": ("gather.cuh", "queue.state[kAgain],", "0,"),
        "bits of listed rows left behind": ("gather.cuh", "queue.wanted[queue.host_slots[i] / 32] = 0;", ""),
        "no barrier before the next tile": ("store.cuh", "__syncthreads();  // the tile before has been read", ""),
        "no barrier after a tile's slots": ("store.cuh", "    }\n    __syncthreads();", "    }"),
        "rows of another tile": ("store.cuh", "params.host_slots[first_row + thread]", "params.host_slots[thread]"),
        "rows of another layer": ("store.cuh", "params.host_layers[layer]", "params.host_layers[0]"),
        "last tile dropped": ("store.cuh", "(params.num_rows + kStoreTile - 1) / kStoreTile", "params.num_rows / kStoreTile"),
        "a tile's end not copied": ("store.cuh", "first < rows * kUnits;", "first < rows * kUnits - kUnits;"),
        "host and device slot swapped in a store": ("store.cuh", "host_rows[shared.host_slots[row]", "host_rows[shared.device_slots[row]"),
        "host and device slot swapped": ("gather.cuh", "static_cast<int64_t>(targets[i])", "static_cast<int64_t>(i < count ? host_slots[i] : 0)"),
    }

    def test_each_fault_is_caught(self):
        for name, fault in self.FAULTS.items():
            with self.subTest(name), tempfile.TemporaryDirectory() as folder:
                sources = on_cpu.copy_with_fault(SOURCES, folder, *fault)
                made = on_cpu.Kernels(sources)
                made.swap_module(64), made.gather_module(656)  # a fault compiles
                self.assertTrue(self.is_caught(sources), "not caught")

    def test_nothing_is_caught_without_a_fault(self):
        self.assertFalse(self.is_caught(SOURCES))

    def is_caught(self, sources):
        """In a process of its own: a fault may write anywhere."""
        child = os.fork()
        if child == 0:
            faulthandler.disable()
            caught = True
            try:
                caught = self.find(sources)
            finally:
                os._exit(1 if caught else 0)
        deadline = time.monotonic() + 120
        while time.monotonic() < deadline:
            ended, status = os.waitpid(child, os.WNOHANG)
            if ended:
                return status != 0
            time.sleep(0.02)
        os.kill(child, signal.SIGKILL)  # a fault may make a loop endless
        os.waitpid(child, 0)
        return True

    def find(self, sources):
        test = TestSwap()
        for seed in range(14):
            for order in ("forward", "backward", "chance"):
                test.on = lambda order, seed=0: run_on_cpu(order, seed, sources)
                case = oracle.random_case(seed, 4, None, seed % 3 == 0)
                try:
                    for ordered in (True, False):
                        test.compare(case, ordered, order, ROW_BYTES[seed % 2], seed)
                    test.check_duplicates(seed, seed % 2 == 0, order)
                    if seed == 0:
                        for count in (65, 200):
                            test.compare_store(3, torch.randperm(count), order)
                    if seed < 3:
                        for num_host_rows, density in ((5000, 0.8), (17001, 0.03), (40000, 0.0005)):
                            test.compare_gather(num_host_rows, density, order, seed)
                except (AssertionError, RuntimeError, IndexError):
                    return True
        return False


if __name__ == "__main__":
    unittest.main()
