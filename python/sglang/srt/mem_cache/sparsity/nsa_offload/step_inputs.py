"""What a decode forward knows of its batch, and the page table that its layers fill."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from sglang.srt.mem_cache.sparsity.nsa_offload.sizing import OffloadSizes

if TYPE_CHECKING:
    from sglang.srt.model_executor.forward_batch_info import ForwardMode


def is_decode_step(forward_mode: "ForwardMode") -> bool:
    """Whether a forward reads windows: decode, or the verify step of speculation."""
    return forward_mode.is_decode() or forward_mode.is_target_verify()


class StepInputs:
    """Fixed buffers, set on the forward's stream before a forward; CUDA graphs read them.

    The batch stands in front, padding behind it. ``B`` requests, padding included, have ``Q``
    query tokens each: 1 in decode, those of a verify step else.

    The page table is one buffer for all layers, written by a layer's swap and read by its
    attention. It holds device slots at any time, so an attention that came too early would read
    old rows, and never a wild address.

    Args:
        sizes: of the windows, one of which each request of a batch has.
        padding: requests that SGLang may add to an eager batch.
        device: of the buffers.

    Attributes:
        queries: Q of the forward set last.
    """

    def __init__(self, sizes: OffloadSizes, padding: int, device: torch.device):
        self._sizes = sizes
        self._device = device
        self._from_end = torch.arange(-sizes.queries, 0, device=device)
        self._max_batch = 0
        self.queries = 1
        self.reserve(sizes.num_windows + padding)

    def reserve(self, max_batch: int) -> None:
        """Make room for a batch; call it before graphs are captured, which keep the buffers.

        Never shrinks: an eager batch may be larger than the largest captured one.
        """

        def filled(size: int, value: int, dtype: torch.dtype) -> torch.Tensor:
            return torch.full((size,), value, dtype=dtype, device=self._device)

        self._max_batch = max_batch = max(max_batch, self._max_batch)
        self._windows = filled(max_batch, -1, torch.int32)
        self._request_rows = filled(max_batch, 0, torch.int32)
        self._lens = filled(max_batch, 0, torch.int32)
        self._write_slots = filled(max_batch * self._sizes.queries, 0, torch.int64)
        self._page_table = filled(max_batch * self._sizes.swap_entries, 0, torch.int32)
        self._batch_size = 0

    def set(
        self,
        batch_size: int,
        windows: torch.Tensor,
        request_rows: torch.Tensor,
        seq_lens: torch.Tensor,
        forward_mode: "ForwardMode",
    ) -> None:
        """Describe a forward of n requests and ``batch_size - n`` of padding.

        Args:
            batch_size: B.
            windows: ``[n]`` int32, -1 for a request without one.
            request_rows: ``[n]``.
            seq_lens: ``[n]``, with this step's token in a decode forward, without this step's
                tokens in a verify forward.
            forward_mode: which of both.
        """
        sizes, num_real = self._sizes, len(windows)
        self.set_padding(batch_size, forward_mode, first=num_real)
        queries, lens = self.queries, seq_lens.long()
        if forward_mode.is_target_verify():
            lens = lens + queries
        new_positions = lens[:, None] + self._from_end[-queries:]
        ring_slots = (
            sizes.first_window_slot
            + windows.long()[:, None] * sizes.window_slots
            + sizes.lru_slots
            + new_positions % sizes.ring_slots
        )
        self._windows[:num_real] = windows
        self._request_rows[:num_real] = request_rows.int()
        self._lens[:num_real] = lens.int()
        self._write_slots[: num_real * queries] = torch.where(
            windows[:, None] >= 0, ring_slots, 0
        ).flatten()

    def set_padding(self, batch_size: int, forward_mode: "ForwardMode", first: int = 0) -> None:
        """Make requests from ``first`` on padding: graph capture and warm-up leave no trace."""
        if batch_size > self._max_batch:
            raise RuntimeError(
                f"A decode batch of {batch_size} requests, padding included, is larger than the "
                f"{self._max_batch} that its windows and padding allow."
            )
        self.queries = self._sizes.queries if forward_mode.is_target_verify() else 1
        self._windows[first:batch_size] = -1
        self._request_rows[first:batch_size] = 0
        self._lens[first:batch_size] = 0
        self._write_slots[first * self.queries : batch_size * self.queries] = 0
        self._batch_size = batch_size

    @property
    def windows(self) -> torch.Tensor:
        """``[B]`` int32, -1 for padding."""
        return self._windows[: self._batch_size]

    @property
    def request_rows(self) -> torch.Tensor:
        """``[B]`` int32, 0 for padding."""
        return self._request_rows[: self._batch_size]

    @property
    def lens(self) -> torch.Tensor:
        """``[B]`` int32 lengths with this step's tokens, 0 for padding."""
        return self._lens[: self._batch_size]

    @property
    def write_slots(self) -> torch.Tensor:
        """``[B * Q]`` int64 device slots of the step's new rows; 0, the dummy slot, for padding."""
        return self._write_slots[: self._batch_size * self.queries]

    @property
    def page_table(self) -> torch.Tensor:
        """``[B * Q, K]`` int32 device slots of the layer in progress; 0 where none was set yet."""
        rows, top_k = self._batch_size * self.queries, self._sizes.top_k
        return self._page_table[: rows * top_k].view(rows, top_k)
