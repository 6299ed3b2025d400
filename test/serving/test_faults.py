"""Each part is on the decode path: replaced by a faulty one, it changes tokens or is caught.

A fault that changed nothing would mean that the part has no caller, or that these tests could not fail.
"""

from contextlib import ExitStack
from unittest import mock

import pytest
import torch
from harness import environment, offload
from harness.scheduler import InprocScheduler
from sglang.srt.mem_cache.sparsity.nsa_offload import adaptor as adaptor_module
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


def rolled(positions: torch.Tensor) -> torch.Tensor:
    """Every list of the batch with its valid entries in reverse order, -1 left in place."""
    out = positions.clone()
    for row in out:
        valid = row >= 0
        row[valid] = row[valid].flip(0)
    return out


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

    def faulty(self, layer, host_slots, device_slots):
        limit = self._device_kv[0].shape[0]
        return load(self, layer, device_slots, torch.where(host_slots < limit, host_slots, -1))

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


def a_miss_counts_as_a_hit(stack):
    prepare = LRUCacheState.prepare_layer_swap

    def faulty(self, *args):
        swap = prepare(self, *args)
        missed = swap.miss_rank >= 0
        return swap._replace(
            window_offsets=torch.where(missed, 0, swap.window_offsets),
            miss_rank=torch.full_like(swap.miss_rank, -1),
        )

    stack.enter_context(mock.patch.object(LRUCacheState, "prepare_layer_swap", faulty))


def a_slot_goes_to_two_entries(stack):
    prepare = LRUCacheState.prepare_layer_swap

    def faulty(self, *args):
        swap = prepare(self, *args)
        first = swap.victim_offsets[:, :1]
        return swap._replace(victim_offsets=torch.where(swap.victim_offsets >= 0, first, -1))

    stack.enter_context(mock.patch.object(LRUCacheState, "prepare_layer_swap", faulty))


def post_process_enters_rows_in_the_wrong_order(stack):
    post = LRUCacheState.lru_post_process

    def faulty(self, layer, windows, swap):
        post(self, layer, windows, swap._replace(miss_positions=rolled(swap.miss_positions)))

    stack.enter_context(mock.patch.object(LRUCacheState, "lru_post_process", faulty))


def positions_map_to_the_neighbour(stack):
    real = adaptor_module.map_seq_positions_to_host_slots
    stack.enter_context(
        mock.patch.object(
            adaptor_module,
            "map_seq_positions_to_host_slots",
            lambda positions, *a: real(torch.where(positions > 0, positions - 1, positions), *a),
        )
    )


def request_rows_are_mixed_up(stack):
    real = adaptor_module.map_seq_positions_to_host_slots
    stack.enter_context(
        mock.patch.object(
            adaptor_module, "map_seq_positions_to_host_slots", lambda p, rows, table: real(p, rows.flip(0), table)
        )
    )


def page_table_is_shifted(stack):
    real = adaptor_module.build_gpu_page_table

    def faulty(*args):
        table, slots = real(*args)
        return torch.where(table > 0, table + 1, table), slots

    stack.enter_context(mock.patch.object(adaptor_module, "build_gpu_page_table", faulty))


def windows_overlap(stack):
    real = SparseSlotAllocator.alloc_contiguous

    def faulty(self):
        window = real(self)
        return Window(0, window.first_slot)

    stack.enter_context(mock.patch.object(SparseSlotAllocator, "alloc_contiguous", faulty))
    stack.enter_context(mock.patch.object(SparseSlotAllocator, "free", lambda *a: None))


def adaptor_repeats_the_first_layer(stack):
    real = NSAOffloadBackendAdaptor.adapt_for_attn_metadata
    first = {}

    def faulty(self, *args, **kwargs):
        table = real(self, *args, **kwargs)
        if kwargs["layer_id"] == 0:
            first["table"] = table
        return first["table"]

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
    a_miss_counts_as_a_hit,
    a_slot_goes_to_two_entries,
    post_process_enters_rows_in_the_wrong_order,
    positions_map_to_the_neighbour,
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


CUDA_FAULTS = {
    "rows of another request": ("swap.cuh", "params.batch_rows[row] * params.row_stride", "row * params.row_stride"),
    "a victim's position kept": ("swap.cuh", "if (evicted[e] >= 0) offset_of[evicted[e]] = kAbsent;", ""),
    "hits are evicted first": (
        "swap.cuh",
        "marks[offsets[e]] = kTouched;\n      last_used[offsets[e]] = now;",
        "last_used[offsets[e]] = now + 1;",
    ),
    "every other wanted row dropped": ("gather.cuh", "first < num_rows; first +=", "first < num_rows; first += 1 +"),
    "end of a row not copied": ("gather.cuh", "= (kUnits + kWarpSize - 1) / kWarpSize", "= kUnits / kWarpSize"),
}


@pytest.fixture(scope="module")
def cuda_settings(tiny_model, expected):
    """One row is enough for the ordered queue."""
    settings = offload.offload_args(swap_kernels="cuda")
    with mock.patch("sglang.jit_kernel.nsa_kv_offload.ORDER_MIN_ROWS", 1):
        assert serve(tiny_model, **settings) == expected
        yield settings


@pytest.mark.skipif(not environment.CAN_RUN_CUDA_SOURCE, reason="needs g++")
@pytest.mark.parametrize("fault", CUDA_FAULTS)
def test_fault_in_the_cuda_kernels_changes_tokens(tiny_model, expected, cuda_settings, fault, tmp_path):
    from sgl_cpu_ref import nsa_swap
    from sglang.jit_kernel import nsa_kv_offload as kernels
    from sglang.jit_kernel.utils import KERNEL_PATH

    sources = KERNEL_PATH / "csrc" / "nsa_kv_offload"
    made = nsa_swap.Kernels(nsa_swap.copy_with_fault(sources, tmp_path, *CUDA_FAULTS[fault]))
    faulty = {"_swap_module": made.swap_module, "_gather_module": made.gather_module}
    with mock.patch.multiple(kernels, **faulty):
        assert serve(tiny_model, **cuda_settings) != expected


def test_window_kept_by_its_former_owner_changes_tokens(tiny_model):
    """Tables that are not reset let a request find another's rows."""
    settings = {**offload.offload_args(), "max_running_requests": 1}
    wanted = serve(tiny_model, max_running_requests=1)
    assert serve(tiny_model, **settings) == wanted
    with mock.patch.object(LRUCacheState, "reset_windows", lambda *a: None):
        assert serve(tiny_model, **settings) != wanted


def test_row_freed_without_its_window_is_caught(tiny_model):
    with mock.patch.object(NSAOffloadCoordinator, "on_request_end", lambda *a: None):
        with InprocScheduler(tiny_model, **offload.server_args(), **offload.offload_args()) as engine:
            engine.run(PROMPTS[:1], 4)
            with pytest.raises(RuntimeError, match="windows"):
                offload.check_idle(engine)
