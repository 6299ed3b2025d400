"""Copies between windows and host pool, and whole decode steps, with rows stamped byte by byte."""

import dataclasses
import random
import unittest
from types import SimpleNamespace

import nsa_offload_tools as tools
import nsa_swap_oracle as oracle
import torch

from sglang.jit_kernel.nsa_kv_offload import MissQueue
from sglang.srt.mem_cache.sparsity.nsa_offload import adaptor, controller, lru_cache
from sglang.srt.mem_cache.sparsity.nsa_offload.device_pool import NSAOffloadTokenToKVPool
from sglang.srt.mem_cache.sparsity.nsa_offload.host_pool import NSAKVOnlyTokenToKVPoolHost
from sglang.srt.mem_cache.sparsity.nsa_offload.sizing import (
    PAGE_TABLE_BYTES_PER_ENTRY,
    OffloadSizes,
)
from sglang.srt.mem_cache.sparsity.nsa_offload.step_inputs import StepInputs
from sglang.srt.model_executor.forward_batch_info import ForwardMode
from sglang.test.test_utils import CustomTestCase

DEVICE = tools.DEVICE
PAGE, LAYERS, TOKENS, CONTEXT, K = 64, 3, 640, 260, 24
SIZES = OffloadSizes(
    num_windows=3,
    window_slots=64 + 64,
    lru_slots=64,
    staging_slots=2 * PAGE,
    num_layers=LAYERS,
    row_bytes=656,
    page_size=PAGE,
    top_k=K,
    queries=2,
)
DTYPES = ((torch.float8_e4m3fn, 656, 656), (torch.bfloat16, 576, 1152))  # dtype, dim, row bytes


def setUpModule():
    tools.need_kernels()


def stamp(request: int, layer: int, position: int, row_bytes: int) -> torch.Tensor:
    """Bytes of one row that no other (request, layer, position) has, in any 16 of them."""
    generator = torch.Generator().manual_seed((request * 100 + layer) * 100000 + position)
    return torch.randint(0, 256, (row_bytes,), dtype=torch.uint8, generator=generator)


class Pools:
    """A device and a host pool full of random bytes, and a controller between them."""

    def __init__(self, dtype, dim, row_bytes, module=controller):
        self.row_bytes = row_bytes
        self.device_pool = NSAOffloadTokenToKVPool(
            TOKENS,
            page_size=PAGE,
            dtype=dtype,
            kv_lora_rank=512,
            qk_rope_head_dim=64,
            layer_num=LAYERS,
            device=DEVICE,
            index_head_dim=128,
            enable_memory_saver=False,
            kv_cache_dim=dim,
            sizes=dataclasses.replace(SIZES, row_bytes=row_bytes),
        )
        memory = "managed" if DEVICE == "cuda" else "plain"
        self.host_pool = NSAKVOnlyTokenToKVPoolHost(self.device_pool, memory)
        self.host = self.host_pool.kv_buffer.view(torch.uint8).flatten(2)
        self.device = [b.view(torch.uint8).flatten(1) for b in self.device_pool.kv_buffer]
        for buffer in (self.host, *self.device):
            buffer.random_(0, 256)
        self.controller = module.SparseCacheController(self.device_pool, self.host_pool)

    def state(self):
        """Copies of both sides once all copies are done: ``[layer, row, byte]``, on the CPU."""
        torch.get_device_module(DEVICE).synchronize()
        return torch.stack([buffer.cpu() for buffer in self.device]), self.host.clone()

    def queue(self, host_slots=(), device_slots=()):
        """A queue of misses that asks for these rows."""
        queue = MissQueue(SIZES.num_windows, SIZES.swap_entries, self.host_pool.size, DEVICE)
        count = len(host_slots)
        queue.host_slots[:count] = slots(*host_slots).int()
        queue.device_slots[:count] = slots(*device_slots).int()
        queue.state[0] = count
        return queue

    def close(self):
        self.host_pool.close()


def slots(*values):
    return torch.tensor(values, dtype=torch.int64, device=DEVICE)


def check_copies(module=controller):
    """Mapped rows byte for byte, every other row and the source untouched, both ways."""
    for spec in DTYPES:
        pools = Pools(*spec, module)
        try:
            _check_load(pools)
            _check_store(pools)
            _check_write_back(pools)
        finally:
            pools.close()


def _check_load(pools):
    for layer in range(LAYERS):
        device, host = pools.state()
        targets, sources = [70, 200, 63 + PAGE, 447], [5, 703, 64, 300]
        pools.controller.load_layer(layer, pools.queue(sources, targets))
        device[layer, targets] = host[layer, sources]
        _compare(pools, device, host)


def _check_store(pools):
    for layer in range(LAYERS):
        device, host = pools.state()
        sources, targets = [450, 455, 66], [64, 703, 129]
        pools.controller.store_layer(layer, slots(*sources), slots(*targets))
        host[layer, targets] = device[layer, sources]
        _compare(pools, device, host)


def _check_write_back(pools):
    device, host = pools.state()
    sources, targets = [130, 300, 447, 64], [70, 131, 702, 200]
    pools.controller.write_back(slots(*sources), slots(*targets))
    host[:, targets] = device[:, sources]
    _compare(pools, device, host)


def _compare(pools, device, host):
    pools.controller.synchronize()
    got_device, got_host = pools.state()
    assert torch.equal(got_device, device), "device rows"
    assert torch.equal(got_host, host), "host rows"


class TestCopies(CustomTestCase):
    def test_both_ways(self):
        check_copies()

    def test_empty_lists(self):
        pools = Pools(*DTYPES[0])
        self.addCleanup(pools.close)
        device, host = pools.state()
        pools.controller.load_layer(0, pools.queue())
        pools.controller.store_layer(0, slots(), slots())
        pools.controller.write_back(slots(), slots())
        _compare(pools, device, host)

    def test_counts_each_token_once(self):
        pools = Pools(*DTYPES[0])
        self.addCleanup(pools.close)
        pools.controller.forward_begin()
        pools.controller.synchronize()
        for layer in range(LAYERS):
            pools.controller.store_layer(layer, slots(64, 65), slots(64, 65))
        pools.controller.write_back(slots(66), slots(66))
        pools.controller.forward_begin()
        self.assertEqual(pools.controller.rows_stored, 3)


def check_arrival(module=controller):
    """Rows count as arrived with their last layer, and no earlier."""
    pools, events = Pools(*DTYPES[0], module), []
    try:
        made = pools.controller

        def record(stream):
            events.append(SimpleNamespace(done=False))
            events[-1].query = lambda event=events[-1]: event.done
            return events[-1]

        made._record = record
        for layer in range(LAYERS):
            made.store_layer(layer, slots(64, 65), slots(64, 65))
        made.write_back(slots(66), slots(66))
        for event, arrived in zip(events, (0, 0, 2, 3)):
            assert made.rows_arrived() == (2 if arrived == 3 else 0)
            event.done = True
            assert made.rows_arrived() == arrived, (made.rows_arrived(), arrived)
        # Nobody asks for long: what is remembered is bounded, and nothing is lost.
        for _ in range(3 * controller.MAX_OPEN_COPIES):
            made.write_back(slots(66), slots(66))
        assert len(made._open_copies) == controller.MAX_OPEN_COPIES
        assert made.rows_arrived() == 3
        for event in events:
            event.done = True
        assert made.rows_arrived() == made.rows_stored == 3 + 3 * controller.MAX_OPEN_COPIES
    finally:
        pools.close()


class TestArrival(CustomTestCase):
    def test_rows_arrive_with_their_last_layer(self):
        check_arrival()

    def test_copy_after_forward(self):
        pools = Pools(*DTYPES[0])
        self.addCleanup(pools.close)
        source = torch.arange(6, device=DEVICE).view(2, 3)
        target = torch.zeros((2, 3), dtype=torch.int64, pin_memory=DEVICE == "cuda")
        for _ in range(2):  # before any forward, and after one
            target.zero_()
            event = pools.controller.copy_after_forward(target, source)
            torch.get_device_module(DEVICE).synchronize()
            self.assertTrue(event.query())
            self.assertTrue(torch.equal(target, source.cpu()))
            pools.controller.forward_begin()

    def test_faults_are_seen(self):
        for name, (old, new) in {
            "first layer for the last": ("self._open_copies.pop()\n", "return\n"),
            "layers counted as copies": ("            self._open_copies.pop()\n", "            pass\n"),
            "asked of the newest": ("self._open_copies[0][1].query()", "self._open_copies[-1][1].query()"),
            "not asked": ("self._open_copies[0][1].query()", "True"),
            "prompts forgotten": ("self.rows_stored += host_slots.numel()\n        self._note_copy()\n\n    def write_back", "self.rows_stored += host_slots.numel()\n\n    def write_back"),
        }.items():  # fmt: skip
            with self.subTest(name), self.assertRaises((AssertionError, IndexError)):
                check_arrival(tools.mutated(controller, old, new))


class Decode:
    """Requests that decode through the adaptor; attention reads only rows it was given.

    Rows carry the stamp of their request, layer and position; each step reads the page table's
    rows and compares them with the stamps of the top-k. With several queries a request, all but
    the first are of drafts: some are refused, and their rows written again with other bytes.
    """

    def __init__(self, spec, modules=(adaptor, controller, lru_cache), seed=0, queries=1):
        self.rng = random.Random(seed)
        self.queries = queries
        self.written = {}  # (request, position): how often, where more than once
        adaptor_module, controller_module, lru_module = modules
        self.pools = Pools(*spec, controller_module)
        self.lru = lru_module.LRUCacheState(
            LAYERS, SIZES.num_windows, SIZES.lru_slots, SIZES.ring_slots, DEVICE
        )
        self.req_to_token = torch.zeros((5, CONTEXT), dtype=torch.int32, device=DEVICE)
        self.adaptor = adaptor_module.NSAOffloadBackendAdaptor(
            torch.device(DEVICE),
            SimpleNamespace(req_to_token=self.req_to_token),
            SIZES,
            self.lru,
            self.pools.controller,
            self.pools.queue(),
        )
        self.free = self.rng.sample(range(PAGE, TOKENS + PAGE), TOKENS)
        self.requests = 0
        self.owner = {}  # window: [request, row, length]

    def admit(self, window, row, prompt):
        self.requests += 1
        self.owner[window] = [self.requests, row, prompt]
        self.lru.ring_begin[window] = prompt
        for position in range(prompt):
            slot = self.new_slot(row, position)
            for layer in range(LAYERS):
                self.pools.host[layer, slot] = self.stamp(window, layer, position)

    def release(self, window):
        row = self.owner.pop(window)[1]
        taken = self.req_to_token[row]
        self.free += taken[taken > 0].tolist()
        taken.zero_()
        self.lru.reset_windows(slots(window))

    def new_slot(self, row, position):
        slot = self.free.pop(0)
        self.req_to_token[row, position] = slot
        return slot

    def stamp(self, window, layer, position):
        request = self.owner[window][0]
        version = self.written.get((request, position), 0)
        return stamp(request + 1000 * version, layer, position, self.pools.row_bytes)

    def ring_slot(self, window, position):
        base = SIZES.first_window_slot + window * SIZES.window_slots
        return base + SIZES.lru_slots + position % SIZES.ring_slots

    def step(self):
        batch, queries = sorted(self.owner), self.queries
        for window in batch:
            request, row, length = self.owner[window]
            for position in range(length, length + queries):
                if int(self.req_to_token[row, position]) == 0:
                    self.new_slot(row, position)
                else:  # the draft written here before was refused
                    again = self.written.get((request, position), 0) + 1
                    self.written[request, position] = again
        windows = torch.tensor([*batch, -1], dtype=torch.int32, device=DEVICE)
        rows = torch.tensor([self.owner[w][1] for w in batch] + [0], dtype=torch.int32, device=DEVICE)
        lengths = [self.owner[w][2] + queries for w in batch]
        for layer in range(LAYERS):
            topk = []
            for window, length in zip(batch, lengths):
                for position in range(length - queries, length):
                    written = self.ring_slot(window, position)
                    self.pools.device[layer][written] = self.stamp(window, layer, position).to(DEVICE)
                for end in range(length - queries + 1, length + 1):
                    chosen = self.rng.sample(range(end), min(end, K - 2))
                    topk.append(chosen + [-1] * (K - len(chosen)))
                    self.rng.shuffle(topk[-1])
            table = self.adaptor.adapt_for_attn_metadata(
                torch.tensor([*topk, *[[-1] * K] * queries], dtype=torch.int32, device=DEVICE),
                None,
                None,
                None,
                None,
                self.req_to_token,
                1,
                layer,
                batch_windows=windows,
                request_rows=rows,
                batch_lens=torch.tensor([*lengths, 0], dtype=torch.int32, device=DEVICE),
                queries=queries,
            )
            self.check_rows(layer, [w for w in batch for _ in range(queries)], topk, table)
        # The step's result is processed: its rows go to the host, without those of refused drafts.
        new = []
        for window in batch:
            accepted, begin = self.rng.randint(1, queries), self.owner[window][2]
            new += [(window, begin + i) for i in range(accepted)]
            self.owner[window][2] += accepted
        self.pools.controller.write_back(
            slots(*[self.ring_slot(*place) for place in new]),
            slots(*[int(self.req_to_token[self.owner[w][1], n]) for w, n in new]),
        )
        self.pools.controller.forward_begin()
        for held in self.lru.position_at_offset.flatten(0, 1):
            oracle.offsets(held)

    def check_rows(self, layer, batch, topk, table):
        for window, positions, found in zip(batch, topk, table.tolist()):
            used = [slot for slot in found if slot >= 0]
            assert len(used) == len(set(used)), "one slot for two entries"
            rows = self.pools.device[layer][used].cpu()
            wanted = [p for p in positions if p >= 0]
            assert [s < 0 for s in found] == [p < 0 for p in positions], "-1 maps to -1"
            for row, position in zip(rows, wanted):
                assert torch.equal(row, self.stamp(window, layer, position)), (
                    f"layer {layer}, window {window}, position {position}"
                )
        assert (table[len(batch) :] == -1).all()

    def run(self):
        """Contexts of several windows, a ring that wraps, and a window with a new owner."""
        self.admit(0, 1, 150)
        self.admit(2, 3, 3)
        for _ in range(4):
            self.step()
        self.release(0)
        self.admit(0, 2, 90)
        self.admit(1, 1, 65)
        for _ in range(5):
            self.step()

    def close(self):
        self.pools.close()


LATE_CYCLES = 20_000_000  # about 10 ms


def check_load_order(module=controller):
    """The list of rows is late, as a top-k may be, and so are the rows."""
    pools = Pools(*DTYPES[0], module)
    try:
        device, host = pools.state()
        targets, sources = [70, 200, 447], [5, 703, 64]
        queue, chosen = pools.queue(), pools.queue(sources, targets)
        pools.controller.load_layer(0, queue)  # compiles now, not while the others are late
        torch.cuda.synchronize()
        torch.cuda._sleep(4 * LATE_CYCLES)
        for empty, filled in zip(queue.tensors(), chosen.tensors()):
            empty.copy_(filled)
        with pools.controller.load_begin():
            torch.cuda._sleep(LATE_CYCLES)
            pools.controller.load_layer(0, queue)
        pools.controller.load_end()
        read = pools.device[0][targets].clone()
        torch.cuda.synchronize()
        assert torch.equal(read.cpu(), host[0, sources]), "attention reads rows that have not come"
    finally:
        torch.cuda.synchronize()
        pools.close()


@unittest.skipUnless(DEVICE == "cuda", "a CPU has no streams")
class TestLoadOrder(CustomTestCase):
    FAULTS = {
        "attention does not wait": "self._module.current_stream().wait_stream(self._load_stream)",
        "load does not wait": "self._load_stream.wait_stream(self._module.current_stream())",
    }

    def test_between_topk_and_attention(self):
        check_load_order()

    def test_faults_are_seen(self):
        for name, line in self.FAULTS.items():
            with self.subTest(name):
                faulty = tools.mutated(controller, line, "pass")
                with self.assertRaises(AssertionError):
                    check_load_order(faulty)


class TestStepInputs(CustomTestCase):
    def setUp(self):
        self.inputs = StepInputs(SIZES, 0, DEVICE)

    def read(self):
        inputs = self.inputs
        tensors = inputs.windows, inputs.request_rows, inputs.lens, inputs.write_slots
        return [tensor.tolist() for tensor in tensors]

    def set(self, batch_size, windows, rows, lens, mode):
        tensors = [torch.tensor(t, dtype=torch.int32, device=DEVICE) for t in (windows, rows, lens)]
        self.inputs.set(batch_size, *tensors, mode)

    def ring(self, window, position):
        first = SIZES.first_window_slot + window * SIZES.window_slots + SIZES.lru_slots
        return first + position % SIZES.ring_slots

    def test_decode(self):
        """The new row is the last of the length; padding and requests without a window own no slot."""
        self.inputs.reserve(4)
        self.set(4, [2, -1, 0], [5, 6, 7], [65, 9, 130], ForwardMode.DECODE)
        slots = [self.ring(2, 64), 0, self.ring(0, 129), 0]
        self.assertEqual(self.read(), [[2, -1, 0, -1], [5, 6, 7, 0], [65, 9, 130, 0], slots])

    def test_verify(self):
        """The lengths come without the step's tokens."""
        self.set(2, [1], [3], [63], ForwardMode.TARGET_VERIFY)
        slots = [self.ring(1, 63), self.ring(1, 64), 0, 0]
        self.assertEqual(self.read(), [[1, -1], [3, 0], [65, 0], slots])

    def test_next_batch_replaces_the_last(self):
        self.set(2, [1, 0], [3, 4], [63, 64], ForwardMode.DECODE)
        self.set(2, [1], [3], [64], ForwardMode.DECODE)
        self.assertEqual(self.read(), [[1, -1], [3, 0], [64, 0], [self.ring(1, 63), 0]])
        self.inputs.set_padding(2, ForwardMode.DECODE)
        self.assertEqual(self.read(), [[-1, -1], [0, 0], [0, 0], [0, 0]])

    def test_room_never_shrinks(self):
        self.inputs.reserve(1)
        self.set(2, [1, 0], [3, 4], [63, 64], ForwardMode.DECODE)
        self.assertEqual(self.read()[0], [1, 0])

    def test_room_for_windows_and_padding(self):
        inputs = StepInputs(SIZES, 3, DEVICE)
        inputs.set_padding(SIZES.num_windows + 3, ForwardMode.DECODE)
        with self.assertRaisesRegex(RuntimeError, "batch of 7 requests.*larger than the 6"):
            inputs.set_padding(SIZES.num_windows + 4, ForwardMode.DECODE)

    def test_page_table_is_one_buffer_of_device_slots(self):
        """What an attention reads that comes too early: the layer before, or the dummy slot."""
        self.set(3, [1, 0], [3, 4], [63, 64], ForwardMode.TARGET_VERIFY)
        table = self.inputs.page_table
        self.assertEqual(table.shape, (3 * SIZES.queries, SIZES.top_k))
        self.assertEqual(table.nbytes, PAGE_TABLE_BYTES_PER_ENTRY * SIZES.num_windows * SIZES.swap_entries)
        self.assertFalse(table.any())
        table.fill_(5)
        self.set(1, [1], [3], [63], ForwardMode.DECODE)
        self.assertEqual(self.inputs.page_table.data_ptr(), table.data_ptr())
        self.assertTrue((self.inputs.page_table == 5).all())


class TestDecode(CustomTestCase):
    def test_every_row_read_is_the_right_one(self):
        for seed, spec in enumerate(DTYPES):
            with self.subTest(spec=spec):
                for queries in (1, 2):
                    decode = Decode(spec, seed=seed, queries=queries)
                    self.addCleanup(decode.close)
                    decode.run()

    def test_ring_wraps(self):
        """Positions that have left the ring are read back from the host."""
        for queries in (1, 2):
            decode = Decode(DTYPES[0], seed=7, queries=queries)
            self.addCleanup(decode.close)
            decode.admit(1, 4, 2)
            for _ in range(SIZES.ring_slots + 4):
                decode.step()


class TestFaultsAreSeen(CustomTestCase):
    COPY_FAULTS = {
        "layer offset lost, to the device": (controller, "self._rows(self._device_kv[layer])", "self._rows(self._device_kv[0])"),
        "layer of the source lost": (controller, "self._rows(self._host_kv[layer])", "self._rows(self._host_kv[0])"),
        "layer offset lost, to the host": (controller, "self._store(self._ptrs_of_layer[layer],", "self._store(self._ptrs_of_layer[0],"),
        "host and device slots swapped, to the host": (controller, "store_rows(*ptrs, device_slots, host_slots,", "store_rows(*ptrs, host_slots % 448, device_slots,"),
        "one layer written back": (controller, "self._store(self._ptrs,", "self._store(self._ptrs_of_layer[0],"),
    }  # fmt: skip
    STEP_FAULTS = {
        "host slots of one request for all": (adaptor, "            request_rows,\n", "            request_rows * 0 + 1,\n"),
        "misses not loaded": (adaptor, "self._controller.load_layer(layer_id, self._queue)", "self._queue.state.zero_(), self._queue.wanted.zero_()"),
        "every layer uses the residency of layer 0": (adaptor, "self._lru.prepare_layer_swap(\n            layer_id,", "self._lru.prepare_layer_swap(\n            0,"),
        "former owner's mapping stays": (lru_cache, "self.position_at_offset.index_fill_(1, windows, -1)", "pass"),
        "windows one apart": (lru_cache, "self.lru_slots + self.ring_slots,", "1,"),
        "window area begins at the padding": (adaptor, "            self._first_window_slot,\n", "            0,\n"),
        "one layer loaded": (controller, "self._rows(self._device_kv[layer])", "self._rows(self._device_kv[0])"),
        "one query's top-k made resident": (adaptor, "selected_indices.reshape(-1, entries),", "selected_indices.view(-1, queries, selected_indices.shape[1])[:, :1].expand(-1, queries, -1).flatten(1).contiguous(),"),
        "rows not written back": (controller, "self._forward_stream.wait_event(self._stored)", "self._host_kv.view(torch.uint8).fill_(0)"),
    }  # fmt: skip

    def test_copies(self):
        for name, (module, old, new) in self.COPY_FAULTS.items():
            with self.subTest(name):
                faulty = tools.mutated(module, old, new)
                with self.assertRaises(AssertionError):
                    check_copies(faulty)

    def test_steps(self):
        for name, (module, old, new) in self.STEP_FAULTS.items():
            with self.subTest(name):
                faulty = tools.mutated(module, old, new)
                modules = [faulty if m is module else m for m in (adaptor, controller, lru_cache)]
                decode = Decode(DTYPES[0], modules, queries=2)
                self.addCleanup(decode.close)
                with self.assertRaises((AssertionError, RuntimeError)):
                    decode.run()


if __name__ == "__main__":
    unittest.main()
