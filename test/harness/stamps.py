"""Byte-exact stamps of (request, position, layer) on latent rows, and a check of every copy of them.

The first elements of each row are overwritten, as it is written on the device, with small numbers that encode whose row it
is. Attention goes on with them, so a scheduler runs as usual; a row that lies where it does not belong is then recognised
by its bytes alone, and so is one that was never copied.
"""

from typing import Any, Dict, List, NamedTuple
from unittest import mock

import torch

DIGITS = 10
"""Base-64 digits of a stamp, one an element: 60 bits."""
POSITION_BITS = 20
LAYER_BITS = 8


class StampError(AssertionError):
    """A row's stamp is not that of the request, position and layer it stands for."""


class Checked(NamedTuple):
    """Rows that `Stamps.check` compared."""

    window_rows: int
    ring_rows: int
    host_rows: int


def encode(requests, positions, layers) -> torch.Tensor:
    """Stamps as digits: uint8 [..., DIGITS], from broadcastable int64 tensors."""
    number = (((requests << POSITION_BITS) | positions) << LAYER_BITS) | layers
    shifts = 6 * torch.arange(DIGITS, device=number.device)
    return ((number.unsqueeze(-1) >> shifts) & 63).to(torch.uint8)


def decode(digits: torch.Tensor) -> List[List[int]]:
    """(request, position, layer) of stamps, for messages."""
    shifts = 6 * torch.arange(DIGITS, device=digits.device)
    numbers = (digits.long() << shifts).sum(-1).flatten().tolist()
    return [
        [n >> (POSITION_BITS + LAYER_BITS), (n >> LAYER_BITS) & ((1 << POSITION_BITS) - 1), n & ((1 << LAYER_BITS) - 1)]
        for n in numbers
    ]


def _digit_bytes(rows: torch.Tensor) -> torch.Tensor:
    """The digit bytes of rows [n, 1, dim]: uint8 [n, DIGITS], a view. bf16 elements hold one in their low byte."""
    step = rows.element_size()
    return rows.view(torch.uint8)[:, 0, : DIGITS * step : step]


class Stamps:
    """While open, schedulers with offloading that are built in this process stamp their rows.

    Open it before the scheduler is built: CUDA graphs capture the stamping.
    """

    def __init__(self) -> None:
        self._patches: List[Any] = []
        self._number_of_rid: Dict[str, int] = {}
        self._request_of_row: Dict[int, int] = {}
        self._length_of_row: Dict[int, int] = {}
        self._stamp_of_slot: Dict[int, torch.Tensor] = {}

    def __enter__(self) -> "Stamps":
        from sglang.srt.managers.schedule_batch import ScheduleBatch
        from sglang.srt.mem_cache.sparsity.nsa_offload.device_pool import NSAOffloadTokenToKVPool as Pool

        write, extend, decode_step = Pool.set_mla_kv_buffer, ScheduleBatch.prepare_for_extend, ScheduleBatch.prepare_for_decode
        stamps = self

        def stamped_write(pool, layer, loc, *rows):
            write(pool, layer, loc, *rows)
            index = layer.layer_id - pool.start_layer
            owners = stamps._slots_of(pool)[loc]
            digits = encode(owners >> POSITION_BITS, owners & ((1 << POSITION_BITS) - 1), torch.tensor(index))
            buffer = pool.kv_buffer[index]
            _digit_bytes(buffer)[pool.write_slots] = digits
            if buffer.element_size() == 2:  # keep the number small: 0x3c00 to 0x3c3f is about 0.008
                high = buffer.view(torch.uint8)[:, 0, 1 : 2 * DIGITS : 2]
                high[pool.write_slots] = torch.full_like(digits, 0x3C)

        def recorded_extend(batch):
            extend(batch)
            stamps._record(batch, batch.prefix_lens, batch.seq_lens_cpu.tolist())

        def recorded_decode(batch):
            decode_step(batch)
            ends = batch.seq_lens_cpu.tolist()
            queries = batch.token_to_kv_pool_allocator.get_kvcache().sizes.queries
            if not batch.spec_algorithm.is_none():  # these lengths are without the step's tokens
                ends = [end + queries for end in ends]
            stamps._record(batch, [end - queries for end in ends], ends)

        self._patches = [
            mock.patch.object(Pool, "set_mla_kv_buffer", stamped_write),
            mock.patch.object(ScheduleBatch, "prepare_for_extend", recorded_extend),
            mock.patch.object(ScheduleBatch, "prepare_for_decode", recorded_decode),
        ]
        for patch in self._patches:
            patch.start()
        return self

    def __exit__(self, *exc) -> None:
        for patch in self._patches:
            patch.stop()

    def _slots_of(self, pool) -> torch.Tensor:
        if id(pool) not in self._stamp_of_slot:
            self._stamp_of_slot = {
                id(pool): torch.zeros(pool.size + pool.page_size, dtype=torch.int64, device=pool.device)
            }
        return self._stamp_of_slot[id(pool)]

    def _record(self, batch, begins, ends) -> None:
        pool = batch.token_to_kv_pool_allocator.get_kvcache()
        stamps: List[int] = []
        slots: List[torch.Tensor] = []
        for req, begin, end in zip(batch.reqs, begins, ends):
            number = self._number_of_rid.setdefault(req.rid, len(self._number_of_rid) + 1)
            self._request_of_row[req.req_pool_idx] = number
            self._length_of_row[req.req_pool_idx] = end
            stamps += [(number << POSITION_BITS) | p for p in range(begin, end)]
            slots.append(batch.req_to_token_pool.req_to_token[req.req_pool_idx, begin:end])
        self._slots_of(pool)[torch.cat(slots).long()] = torch.tensor(stamps, dtype=torch.int64).to(pool.device)

    def check(self, engine, host: bool = True, max_host_rows: int = 1 << 62) -> Checked:
        """Compare every resident row, ring row and (where ``host``) written-back host row of the running requests.

        Args:
            engine: an `InprocScheduler` between two steps.
            host: compare host rows too.
            max_host_rows: of each request, the newest ones.

        Raises:
            StampError: names the place, the stamp found and the one expected.
        """
        pool = engine.kv_pool
        coordinator = engine.scheduler.req_to_token_pool.sparse_coordinator
        torch.get_device_module(pool.device).synchronize()
        # The last decode step of the overlapped loop has not been processed, so not written back.
        lag = coordinator.sizes.queries if engine.scheduler.enable_overlap else 0
        counts = [0, 0, 0]
        for row, lease in dict(coordinator._leases).items():
            request, length = self._request_of_row[row], self._length_of_row[row]
            counts[0] += self._check_window(pool, coordinator, row, request, lease)
            counts[1] += self._check_ring(pool, coordinator, request, lease, length)
            if host:
                counts[2] += self._check_host(pool, coordinator, row, request, length - lag, max_host_rows)
        return Checked(*counts)

    def _check_window(self, pool, coordinator, row, request, lease) -> int:
        held = coordinator.lru.position_at_offset[:, lease.window.index]
        total = 0
        for layer, positions in enumerate(held):
            offsets = (positions >= 0).nonzero().squeeze(-1)
            found = _digit_bytes(pool.kv_buffer[layer][lease.window.first_slot + offsets])
            _compare(found, request, positions[offsets].long(), layer, f"window of row {row}")
            total += offsets.numel()
        return total

    def _check_ring(self, pool, coordinator, request, lease, length) -> int:
        sizes = coordinator.sizes
        first = max(lease.first_position, length - sizes.ring_slots)
        positions = torch.arange(first, length, device=pool.device)
        slots = lease.window.first_slot + sizes.lru_slots + positions % sizes.ring_slots
        for layer in range(pool.layer_num):
            _compare(_digit_bytes(pool.kv_buffer[layer][slots]), request, positions, layer, "ring")
        return positions.numel() * pool.layer_num

    def _check_host(self, pool, coordinator, row, request, length, max_rows) -> int:
        positions = torch.arange(max(0, length - max_rows), length)
        slots = coordinator.req_to_token_pool.req_to_token[row, positions.to(pool.device)].cpu().long()
        for layer in range(pool.layer_num):
            found = _digit_bytes(pool.host_pool.kv_buffer[layer][slots])
            _compare(found, request, positions, layer, "host")
        return positions.numel() * pool.layer_num


def _compare(found: torch.Tensor, request: int, positions: torch.Tensor, layer: int, place: str) -> None:
    expected = encode(torch.tensor(request, device=positions.device), positions, torch.tensor(layer, device=positions.device))
    wrong = (found != expected).any(-1)
    if wrong.any():
        index = int(wrong.nonzero()[0])
        raise StampError(
            f"{place}: {int(wrong.sum())} of {wrong.numel()} rows of layer {layer} are wrong; position "
            f"{int(positions[index])} of request {request} holds (request, position, layer) = {decode(found[index])[0]}"
        )
