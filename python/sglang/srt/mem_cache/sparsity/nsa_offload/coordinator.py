"""Lifecycle of offloaded requests: who owns which window, and what each forward needs."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Optional

import torch

from sglang.srt.disaggregation.held_transfer import HeldTransfer
from sglang.srt.mem_cache.memory_pool import ReqToTokenPool
from sglang.srt.mem_cache.sparsity.algorithms.deepseek_nsa import DeepSeekNSAAlgorithm
from sglang.srt.mem_cache.sparsity.core.sparse_coordinator import (
    SparseConfig,
    SparseCoordinator,
)
from sglang.srt.mem_cache.sparsity.nsa_offload.adaptor import NSAOffloadBackendAdaptor
from sglang.srt.mem_cache.sparsity.nsa_offload.controller import SparseCacheController
from sglang.srt.mem_cache.sparsity.nsa_offload.device_pool import NSAOffloadTokenToKVPool
from sglang.srt.mem_cache.sparsity.nsa_offload.host_pool import NSAKVOnlyTokenToKVPoolHost
from sglang.srt.mem_cache.sparsity.nsa_offload.lru_cache import LRUCacheState
from sglang.srt.mem_cache.sparsity.nsa_offload.sizing import OffloadSizes
from sglang.srt.mem_cache.sparsity.nsa_offload.staging import PrefillStaging
from sglang.srt.mem_cache.sparsity.nsa_offload.step_inputs import StepInputs, is_decode_step
from sglang.srt.mem_cache.sparsity.nsa_offload.uploads import upload
from sglang.srt.mem_cache.sparsity.nsa_offload.window_allocator import Lease, SparseSlotAllocator

if TYPE_CHECKING:
    from sglang.srt.disaggregation.decode import DecodeRequest
    from sglang.srt.layers.radix_attention import RadixAttention
    from sglang.srt.managers.schedule_batch import Req, ScheduleBatch
    from sglang.srt.managers.utils import GenerationBatchResult
    from sglang.srt.model_executor.forward_batch_info import ForwardBatch, ForwardMode


@dataclass
class LayerSwap:
    """A layer's swap on the load stream, from its top-k to its attention.

    Attributes:
        layer_id: layer of the model.
        topk: ``[B * Q, K]`` int32 positions. The forward stream's memory, kept until that stream
            has waited for the load stream.
    """

    layer_id: int
    topk: torch.Tensor


class NSAOffloadCoordinator(SparseCoordinator):
    """Called by the scheduler (on the CPU, ahead of the GPU) and by the attention backend.

    Scheduler side, in the order of a request's life: ``prepare_extend``, ``prepare_decode``
    (which begins a request), ``forward_end``, ``on_request_end``. These change CPU state,
    queue what the tables need, and issue the write-back. ``forward_begin`` applies the queue on
    the forward stream, so a change is ordered after every forward launched before it.

    Backend side, in every layer: of a decode step ``swap_begin`` and ``attention_begin``, of a
    prefill ``attention_end``.
    """

    def __init__(
        self,
        sizes: OffloadSizes,
        req_to_token_pool: ReqToTokenPool,
        device_pool: NSAOffloadTokenToKVPool,
        host_pool: NSAKVOnlyTokenToKVPoolHost,
        keep_finished_rows: bool = False,
        batch_padding: int = 0,
    ):
        device = device_pool.device
        # A prefix cache may hand a finished request's slots to another.
        self._keep_finished_rows = keep_finished_rows
        self.sizes = sizes
        self.host_pool = host_pool
        self.windows = SparseSlotAllocator(sizes)
        self.staging = PrefillStaging(
            sizes, device_pool.size // sizes.page_size, device
        )
        self.lru = LRUCacheState(
            sizes.num_layers,
            sizes.num_windows,
            sizes.lru_slots,
            sizes.ring_slots,
            device,
        )
        self.controller = SparseCacheController(device_pool, host_pool)
        config = SparseConfig(
            top_k=sizes.top_k,
            device_buffer_size=sizes.window_slots,
            host_to_device_ratio=1,
            page_size=1,
            min_sparse_prompt_len=0,
        )
        super().__init__(
            config,
            DeepSeekNSAAlgorithm(config, device),
            NSAOffloadBackendAdaptor(
                device,
                req_to_token_pool,
                sizes,
                self.lru,
                self.controller,
                # Padded rows queue nothing, so it need not hold more requests than have windows.
                host_pool.miss_queue(sizes.num_windows, sizes.swap_entries),
            ),
            req_to_token_pool,
            device_pool,
            device_pool.start_layer,
            device_pool.start_layer + device_pool.layer_num,
            device,
        )
        # CPU state, owned by the scheduler thread.
        self._leases: dict[int, Lease] = {}
        self._admitted_rows: list[int] = []
        self._released: list[tuple[int, int]] = []  # (request row, window index)
        # Device state, changed on the forward stream only.
        rows = req_to_token_pool.req_to_token.shape[0]
        self._window_of_row = torch.full((rows,), -1, dtype=torch.int32, device=device)
        self.inputs = StepInputs(sizes, batch_padding, device)
        self._swap: Optional[LayerSwap] = None  # begun by the layer in progress

    # ---- scheduler side -------------------------------------------------------------

    def prepare_extend(self, batch: "ScheduleBatch") -> None:
        """Stage the tokens of a prefill batch; its requests have their rows and slots."""
        self.staging.recycle()
        for req, prefix_len, extend_len in zip(
            batch.reqs, batch.prefix_lens, batch.extend_lens
        ):
            seq_len = prefix_len + extend_len
            prompt_len = len(req.origin_input_ids) + len(req.output_ids)
            self.staging.stage(
                req.req_pool_idx, prefix_len, seq_len, is_last_chunk=seq_len >= prompt_len
            )

    def prepare_decode(self, batch: "ScheduleBatch") -> None:
        """Give each request of a decode batch its window; call before lengths grow."""
        self.staging.recycle()
        for req, seq_len in zip(batch.reqs, batch.seq_lens_cpu.tolist()):
            if req.req_pool_idx not in self._leases:
                self.on_request_begin(req, first_position=seq_len)

    def on_request_begin(self, req: "Req", first_position: int = 0) -> None:
        """Begin decoding a request: all positions before ``first_position`` are on the host."""
        row = req.req_pool_idx
        self._leases[row] = Lease(
            self.windows.alloc_contiguous(), first_position, first_position
        )
        self._admitted_rows.append(row)

    def on_request_end(self, req: "Req") -> None:
        """Give back what the request's row owns, before the row is freed. Idempotent.

        Finish, abort, retract and failed transfers all come here.
        """
        row = req.req_pool_idx
        if row is None:
            return
        self.staging.release(row)
        lease = self._leases.get(row)
        if lease is None:
            return
        if self._keep_finished_rows and req.finished():
            self._write_back_last_rows(row, lease, req.kv_committed_len)
        del self._leases[row]
        self.windows.free(lease.window)
        self._released.append((row, lease.window.index))
        if row in self._admitted_rows:
            self._admitted_rows.remove(row)

    def forward_end(self, batch: "ScheduleBatch", result: "GenerationBatchResult") -> None:
        """Write a finished decode step's new rows to the host, all layers.

        Called from the output processor, which has waited for the step. A request that ended
        or was retracted meanwhile has no slots any more, and no lease: its rows are skipped, as
        are those of refused drafts. The last token has no row yet. The rows stay in the ring
        until a later ``forward_begin`` has waited for the copy.
        """
        lens = batch.seq_lens_cpu.tolist()
        if batch.spec_algorithm.is_none():
            ends = lens
        else:  # these lengths are without the step's tokens
            ends = [length + new for length, new in zip(lens, result.accept_lens.tolist())]
        rows, positions, device_slots = [], [], []
        for req, end in zip(batch.reqs, ends):
            lease = self._leases.get(req.req_pool_idx)
            if lease is None or req.finished() or req.is_retracted:
                continue
            for position in range(lease.end_position, end):
                rows.append(req.req_pool_idx)
                positions.append(position)
                device_slots.append(self._ring_slot(lease, position))
            lease.end_position = end
        if rows:
            rows, positions, device_slots = upload([rows, positions, device_slots], self.device)
            self.controller.write_back(
                device_slots, self.req_to_token_pool.req_to_token[rows, positions].long()
            )

    def hold_transfer(self, decode_req: "DecodeRequest") -> None:
        """Keep a request's slots from its prefill node while their last owner may be written.

        That is by copies to the host, and by the forward in flight, which still writes index keys
        (and rows of a draft layer) of a request that has ended. A release that no forward has seen
        yet tells that there may be one.

        Args:
            decode_req: has its slots; its receiver sends the metadata next.
        """
        events = self.controller.writes_in_flight(forwards=bool(self._released))
        if events:
            HeldTransfer(decode_req.kv_receiver, events)

    def _write_back_last_rows(self, row: int, lease: Lease, committed: int) -> None:
        """Complete a finished request on the host, where a prefix cache keeps its slots.

        The overlapped loop has launched one more forward for it, whose row is committed too:
        the copy waits for that forward.
        """
        positions = range(lease.end_position, committed)
        if not positions:
            return
        ring_slots = [self._ring_slot(lease, position) for position in positions]
        device_slots = upload(ring_slots, self.device)
        host_slots = self.req_to_token_pool.req_to_token[
            row, lease.end_position : committed
        ].long()
        self.controller.wait_for_forward()
        self.controller.write_back(device_slots, host_slots)

    def _ring_slot(self, lease: Lease, position: int) -> int:
        sizes = self.sizes
        return lease.window.first_slot + sizes.lru_slots + position % sizes.ring_slots

    # ---- forward --------------------------------------------------------------------

    def forward_begin(self, forward_batch: "ForwardBatch") -> None:
        """Start a forward on its stream: tables up to date, earlier copies to the host done.

        Raises:
            RuntimeError: SGLang runs a decode batch as a prefill, which would read staging slots.
        """
        if hasattr(forward_batch, "_original_forward_mode"):
            raise RuntimeError(
                f"A {forward_batch._original_forward_mode.name} batch came as "
                f"{forward_batch.forward_mode.name}: its rows are in windows, not staged."
            )
        if is_decode_step(forward_batch.forward_mode):
            self.decode_begin(
                forward_batch.batch_size,
                # SGLang pads an eager batch, and keeps what it was.
                getattr(forward_batch, "_original_batch_size", forward_batch.batch_size),
                forward_batch.req_pool_indices,
                forward_batch.seq_lens,
                forward_batch.forward_mode,
            )
            return
        self._apply_pending()
        self.token_to_kv_pool.write_slots = self.staging.device_slots(
            forward_batch.out_cache_loc
        )

    def decode_begin(
        self,
        batch_size: int,
        num_real: int,
        req_pool_indices: torch.Tensor,
        seq_lens: torch.Tensor,
        forward_mode: "ForwardMode",
    ) -> None:
        """Set the inputs of a decode or verify forward, eager or replayed.

        Args:
            batch_size: requests of the forward, padding included.
            num_real: those that exist; the rest, at the end, touch nothing.
            req_pool_indices: ``[>= num_real]`` request rows.
            seq_lens: ``[>= num_real]``, with this step's token in a decode forward, without
                this step's tokens in a verify forward.
            forward_mode: which of both.
        """
        self._apply_pending()
        rows = req_pool_indices[:num_real]
        windows = self._window_of_row[rows]
        self.inputs.set(batch_size, windows, rows, seq_lens[:num_real], forward_mode)
        self.token_to_kv_pool.write_slots = self.inputs.write_slots

    def padding_begin(self, batch_size: int, forward_mode: "ForwardMode") -> None:
        """Set the inputs of a forward that has padding alone: graph capture, warm-up."""
        self.inputs.set_padding(batch_size, forward_mode)
        self.token_to_kv_pool.write_slots = self.inputs.write_slots

    def _apply_pending(self) -> None:
        self.controller.forward_begin()
        self.staging.apply_pending(self.req_to_token_pool.req_to_token)
        if self._released:
            rows, windows = upload(list(zip(*self._released)), self.device)
            self._window_of_row.index_fill_(0, rows, -1)  # a number put by index is waited for
            self.lru.reset_windows(windows)
            self._released = []
        if self._admitted_rows:
            leases = [self._leases[row] for row in self._admitted_rows]
            rows, windows, positions = upload(
                [
                    self._admitted_rows,
                    [lease.window.index for lease in leases],
                    [lease.first_position for lease in leases],
                ],
                self.device,
            )
            self._window_of_row[rows] = windows.int()
            self.lru.begin_windows(windows, positions)
            self._admitted_rows = []

    # ---- one layer ------------------------------------------------------------------

    def pad_write_slots(self, num_tokens: int) -> None:
        """Give each token of a decode step a device slot.

        SGLang pads the tokens of an eager verify step after its forward has begun; theirs is the
        dummy slot.
        """
        slots = self.token_to_kv_pool.write_slots
        if num_tokens > len(slots):
            padding = (0, num_tokens - len(slots))
            self.token_to_kv_pool.write_slots = torch.nn.functional.pad(slots, padding)

    def swap_begin(self, layer_id: int, topk: torch.Tensor) -> None:
        """Make a decode layer's top-k resident beside what the forward does up to its attention.

        Args:
            topk: ``[>= B * Q, K]`` int32 positions, -1 for none; Q queries a request. More rows
                are padding.
        """
        page_table = self.inputs.page_table
        topk = topk[: len(page_table)]
        with self.controller.load_begin():
            self.backend_adaptor.adapt_for_attn_metadata(
                selected_indices=topk,
                valid_lengths=None,
                sparse_mask=None,
                current_metadata=None,
                forward_batch=None,
                req_to_token=self.req_to_token_pool.req_to_token,
                page_size=self.page_size,
                layer_id=layer_id - self.start_layer,
                batch_windows=self.inputs.windows,
                request_rows=self.inputs.request_rows,
                batch_lens=self.inputs.lens,
                queries=self.inputs.queries,
                out=page_table,
            )
        self._swap = LayerSwap(layer_id, topk)

    def _handle_sparse_retrieve(
        self,
        query: torch.Tensor,
        layer: "RadixAttention",
        forward_batch: "ForwardBatch",
        attn_metadata: Optional[Any],
        *,
        topk_indices: torch.Tensor,
        **kwargs,
    ) -> torch.Tensor:
        """``attention_begin`` of a decode layer; the model's own indexer chose the top-k.

        Args:
            topk_indices: ``[>= B * Q, K]`` int32 positions, as in ``swap_begin``.

        Returns:
            ``[B * Q, K]`` int32 device slots. On the current stream each of them holds its row.
        """
        if self._swap is None or self._swap.layer_id != layer.layer_id:
            # A layer that takes over another's top-k has not run its indexer.
            self.swap_begin(layer.layer_id, topk_indices)
        self.controller.load_end()
        self._swap = None
        return self.inputs.page_table

    def attention_end(
        self,
        output: torch.Tensor,
        layer: "RadixAttention",
        forward_batch: "ForwardBatch",
    ) -> None:
        """After a prefill layer: send its rows to the host. Decode has nothing left to do."""
        if not is_decode_step(forward_batch.forward_mode):
            # Padding stands behind the prompts' tokens, and has no row.
            num_tokens = sum(forward_batch.extend_seq_lens_cpu)
            self.controller.store_layer(
                layer.layer_id - self.start_layer,
                self.token_to_kv_pool.write_slots[:num_tokens],
                forward_batch.out_cache_loc[:num_tokens],
            )

    # ---- idle -----------------------------------------------------------------------

    def check_idle(self) -> None:
        """Check that nothing is owned when no request is left; synchronizes.

        Raises:
            RuntimeError: names what leaked.
        """
        # The tables change on the stream of whoever asks, so no forward may be at work on them.
        self.controller.synchronize(forwards=True)
        self._apply_pending()
        leaks = {
            "leases": len(self._leases),
            "windows": self.windows.num_windows - self.windows.num_free,
            "staging pages": self.staging.num_pages - self.staging.num_free,
            "staged host pages": int((self.staging.device_page_of_host_page != 0).sum()),
            "rows with a window": int((self._window_of_row >= 0).sum()),
            "resident entries": self.lru.resident_entries(),
        }
        leaked = {name: count for name, count in leaks.items() if count}
        if leaked:
            raise RuntimeError(f"Decode KV offloading leaked while idle: {leaked}.")

    def close(self) -> None:
        """Give host memory back before the process ends; for owners of several."""
        self.controller.synchronize(forwards=True)
        self.host_pool.close()
