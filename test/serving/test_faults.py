"""Each part is on the decode path: replaced by a faulty one, it changes tokens or is caught.

A fault that changed nothing would mean that the part has no caller, or that these tests could not fail.
"""

from contextlib import ExitStack
from unittest import mock

import pytest
import torch
from harness import offload
from harness.scheduler import InprocScheduler
from sglang.jit_kernel.nsa_kv_offload import MissQueue
from sglang.srt.environ import envs
from sglang.srt.mem_cache.sparsity.nsa_offload import host_pool
from sglang.srt.mem_cache.sparsity.nsa_offload.adaptor import NSAOffloadBackendAdaptor
from sglang.srt.mem_cache.sparsity.nsa_offload.controller import SparseCacheController
from sglang.srt.mem_cache.sparsity.nsa_offload.coordinator import NSAOffloadCoordinator
from sglang.srt.mem_cache.sparsity.nsa_offload.device_pool import NSAOffloadTokenToKVPool
from sglang.srt.mem_cache.sparsity.nsa_offload.host_pool import NSAKVOnlyTokenToKVPoolHost
from sglang.srt.mem_cache.sparsity.nsa_offload.lru_cache import LRUCacheState
from sglang.srt.mem_cache.sparsity.nsa_offload.staging import PrefillStaging
from sglang.srt.mem_cache.sparsity.nsa_offload.window_allocator import SparseSlotAllocator, Window

PROMPTS = offload.prompts((65, 300, 420), seed=3)
NEW_TOKENS = 110


def serve(tiny_model, **more):
    with InprocScheduler(tiny_model, **offload.server_args(), **more) as engine:
        return engine.run(PROMPTS, NEW_TOKENS)


@pytest.fixture(scope="module")
def expected(tiny_model):
    tokens = serve(tiny_model)
    assert serve(tiny_model, **offload.offload_args()) == tokens
    return tokens


def host_pool_loses_the_layer(stack):
    init = NSAKVOnlyTokenToKVPoolHost.init_kv_buffer

    def faulty(self):
        return init(self)[:1].expand(self.layer_num, -1, -1, -1)

    stack.enter_context(mock.patch.object(NSAKVOnlyTokenToKVPoolHost, "init_kv_buffer", faulty))


def load_loses_the_layer(stack):
    load = SparseCacheController.load_layer
    stack.enter_context(
        mock.patch.object(SparseCacheController, "load_layer", lambda self, layer, *a: load(self, 0, *a))
    )


def load_swaps_host_and_device_slots(stack):
    load = SparseCacheController.load_layer

    def faulty(self, layer, queue):
        host_slots = queue.host_slots.clone()
        queue.host_slots.copy_(queue.device_slots % self._host_kv[0].shape[0])
        queue.device_slots.copy_(host_slots % self._device_kv[0].shape[0])
        load(self, layer, queue)
        queue.wanted.zero_()

    stack.enter_context(mock.patch.object(SparseCacheController, "load_layer", faulty))


def prefill_rows_are_not_stored(stack):
    stack.enter_context(mock.patch.object(SparseCacheController, "store_layer", lambda *a: None))


def decoded_rows_are_not_written_back(stack):
    stack.enter_context(mock.patch.object(NSAOffloadCoordinator, "forward_end", lambda *a: None))


def write_back_writes_one_row_late(stack):
    write = SparseCacheController.write_back
    stack.enter_context(
        mock.patch.object(SparseCacheController, "write_back", lambda self, d, h: write(self, d, h - 1))
    )


def misses_are_not_loaded(stack):
    prepare = LRUCacheState.prepare_layer_swap

    def faulty(self, *args):
        page_table = prepare(self, *args)
        (queue,) = (arg for arg in args if isinstance(arg, MissQueue))
        queue.state.zero_()
        queue.wanted.zero_()
        return page_table

    stack.enter_context(mock.patch.object(LRUCacheState, "prepare_layer_swap", faulty))


def a_slot_goes_to_two_entries(stack):
    prepare = LRUCacheState.prepare_layer_swap

    def faulty(self, *args):
        page_table = prepare(self, *args)
        return page_table.copy_(torch.where(page_table > 0, page_table & ~1, page_table))

    stack.enter_context(mock.patch.object(LRUCacheState, "prepare_layer_swap", faulty))


def request_rows_are_mixed_up(stack):
    prepare = LRUCacheState.prepare_layer_swap

    def faulty(self, layer, topk, windows, seq_lens, rows, *args):
        return prepare(self, layer, topk, windows, seq_lens, rows.flip(0), *args)

    stack.enter_context(mock.patch.object(LRUCacheState, "prepare_layer_swap", faulty))


def page_table_is_shifted(stack):
    real = NSAOffloadBackendAdaptor.adapt_for_attn_metadata

    def faulty(self, *args, **kwargs):
        page_table = real(self, *args, **kwargs)
        return page_table.copy_(torch.where(page_table > 0, page_table + 1, page_table))

    stack.enter_context(mock.patch.object(NSAOffloadBackendAdaptor, "adapt_for_attn_metadata", faulty))


def windows_overlap(stack):
    alloc, free, given = SparseSlotAllocator.alloc_contiguous, SparseSlotAllocator.free, []

    def faulty(self):
        given.append(alloc(self))
        return Window(0, given[-1].first_slot)

    stack.enter_context(mock.patch.object(SparseSlotAllocator, "alloc_contiguous", faulty))
    stack.enter_context(mock.patch.object(SparseSlotAllocator, "free", lambda self, window: free(self, given.pop())))


def adaptor_repeats_the_first_layer(stack):
    real = NSAOffloadBackendAdaptor.adapt_for_attn_metadata
    first = {}

    def faulty(self, *args, **kwargs):
        table = real(self, *args, **kwargs)
        if kwargs["layer_id"] == 0:
            first["table"] = table.clone()
        return table.copy_(first["table"])

    stack.enter_context(mock.patch.object(NSAOffloadBackendAdaptor, "adapt_for_attn_metadata", faulty))


def staging_mixes_pages(stack):
    real = PrefillStaging.device_slots
    stack.enter_context(
        mock.patch.object(PrefillStaging, "device_slots", lambda self, slots: real(self, slots // 64 * 64))
    )


def new_rows_are_written_elsewhere(stack):
    real = NSAOffloadTokenToKVPool.set_mla_kv_buffer

    def faulty(self, layer, loc, *rows):
        slots = self.write_slots
        self.write_slots = torch.where(slots > 0, slots - 1, slots)
        real(self, layer, loc, *rows)
        self.write_slots = slots

    stack.enter_context(mock.patch.object(NSAOffloadTokenToKVPool, "set_mla_kv_buffer", faulty))


def ring_begins_too_early(stack):
    begin = NSAOffloadCoordinator.on_request_begin
    stack.enter_context(
        mock.patch.object(
            NSAOffloadCoordinator, "on_request_begin", lambda self, req, first_position: begin(self, req, 0)
        )
    )


FAULTS = [
    host_pool_loses_the_layer,
    load_loses_the_layer,
    load_swaps_host_and_device_slots,
    prefill_rows_are_not_stored,
    decoded_rows_are_not_written_back,
    write_back_writes_one_row_late,
    misses_are_not_loaded,
    a_slot_goes_to_two_entries,
    request_rows_are_mixed_up,
    page_table_is_shifted,
    windows_overlap,
    adaptor_repeats_the_first_layer,
    staging_mixes_pages,
    new_rows_are_written_elsewhere,
    ring_begins_too_early,
]


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.__name__)
def test_fault_changes_tokens(tiny_model, expected, fault):
    with ExitStack() as stack:
        fault(stack)
        assert serve(tiny_model, **offload.offload_args()) != expected


# In the stages of a swap that one launch does together.
KERNEL_FAULTS = {
    "rows of another request": ("swap.cuh", "params.request_rows[row] * params.row_stride", "row * params.row_stride"),
    "positions map to the neighbour's host slot": ("swap.cuh", "host_slot_of[positions[e]]", "host_slot_of[positions[e] ^ 1]"),
    "a victim's position kept": ("swap.cuh", "position_at[offset] =", "if (position_at[offset] < 0) position_at[offset] ="),
    "a row entered as its neighbour": ("swap.cuh", "position_at[offset] = positions[e];", "position_at[offset ^ 1] = positions[e];"),
    "hits are evicted first": (
        "swap.cuh",
        "if (!(touched >> 8 * i & 0xff)) ages |= static_cast<uint32_t>(age_bucket(age)) << 8 * i;",
        "ages |= static_cast<uint32_t>(touched >> 8 * i & 0xff ? kOldest : age_bucket(age)) << 8 * i;",
    ),
    "bits left behind": ("gather.cuh", "if (word != 0) queue.wanted[first_slot / 32] = 0;", ""),
    "every other wanted row dropped": ("gather.cuh", "first < num_rows; first +=", "first < num_rows; first += 1 +"),
    "end of a row not copied": ("gather.cuh", "(kLineUnits - 1 + kUnits + kWarpSize - 1)", "kUnits"),
}


@pytest.mark.parametrize("order_min_rows", [1, 1 << 30])
def test_tokens_in_either_order_of_the_rows(tiny_model, expected, order_min_rows):
    with mock.patch.object(host_pool, "ORDER_MIN_ROWS", order_min_rows):
        assert serve(tiny_model, **offload.offload_args()) == expected


@pytest.mark.parametrize("fault", KERNEL_FAULTS)
def test_fault_in_the_kernels_changes_tokens(tiny_model, expected, fault, tmp_path):
    from sgl_cpu_ref import nsa_swap
    from sglang.jit_kernel import nsa_kv_offload as kernels
    from sglang.jit_kernel.utils import KERNEL_PATH

    sources = KERNEL_PATH / "csrc" / "nsa_kv_offload"
    made = nsa_swap.Kernels(nsa_swap.copy_with_fault(sources, tmp_path, *KERNEL_FAULTS[fault]))
    faulty = {"_swap_module": made.swap_module, "_gather_module": made.gather_module}
    # One row is enough for the order by address.
    with mock.patch.object(host_pool, "ORDER_MIN_ROWS", 1), mock.patch.multiple(kernels, **faulty):
        assert serve(tiny_model, **offload.offload_args()) != expected


def test_window_kept_by_its_former_owner_changes_tokens(tiny_model):
    """Tables that are not reset let a request find another's rows."""
    settings = {**offload.offload_args(), "max_running_requests": 1}
    wanted = serve(tiny_model, max_running_requests=1)
    assert serve(tiny_model, **settings) == wanted
    with mock.patch.object(LRUCacheState, "reset_windows", lambda *a: None):
        with pytest.raises(ValueError, match="leaked while idle: .*resident entries"):
            serve(tiny_model, **settings)
        with envs.SGLANG_ENABLE_STRICT_MEM_CHECK_DURING_IDLE.override(False):
            assert serve(tiny_model, **settings) != wanted


def test_row_freed_without_its_window_is_caught(tiny_model):
    with mock.patch.object(NSAOffloadCoordinator, "on_request_end", lambda *a: None):
        with InprocScheduler(tiny_model, **offload.server_args(), **offload.offload_args()) as engine:
            with pytest.raises(ValueError, match="leaked while idle: .*windows"):
                engine.run(PROMPTS[:1], 4)
