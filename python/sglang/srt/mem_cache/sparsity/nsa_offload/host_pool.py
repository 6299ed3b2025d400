"""The host pool: latent KV rows of every token, layer first, without index keys."""

from __future__ import annotations

import logging
from contextlib import contextmanager

import numpy as np
import torch

from sglang.jit_kernel.nsa_kv_offload import (
    ORDER_MIN_ROWS,
    ORDER_MIN_ROWS_MANAGED,
    MissQueue,
)
from sglang.srt.distributed import get_world_group
from sglang.srt.mem_cache.memory_pool import NSATokenToKVPool
from sglang.srt.mem_cache.memory_pool_host import HostKVCache
from sglang.srt.mem_cache.sparsity.nsa_offload.host_limits import available_host_bytes
from sglang.srt.mem_cache.sparsity.nsa_offload.host_memory import (
    HOST_RESERVE_BYTES,
    HostBuffer,
)

logger = logging.getLogger(__name__)


class NSAKVOnlyTokenToKVPoolHost(HostKVCache):
    """Rows addressed by host slot, which is SGLang's logical slot: nothing is allocated here.

    The paged allocator of the scheduler hands out the slots, so ``alloc`` and ``free`` of the
    base class have no caller. Rows 0 to 63 belong to the padding page and hold no token.

    Attributes:
        kv_buffer: ``[layer_num, size, 1, kv_cache_dim]`` in the device pool's store dtype.
        memory: kind of host memory.
        row_bytes: bytes of one token in one layer (656 for fp8, 1152 for bf16).
        layer_ptrs: ``[layer_num]`` uint64 on the device, address of each layer's first row.

    Args:
        memory: kind of host memory, as ``HostBuffer`` has them.
        show_progress: draw a bar while the memory is made.

    Raises:
        ValueError: more memory asked for than the machine has free.
    """

    def __init__(
        self, device_pool: NSATokenToKVPool, memory: str, show_progress: bool = False
    ):
        self.memory = memory
        self._show_progress = show_progress
        with _without_words_of_another_feature():
            super().__init__(
                device_pool,
                host_to_device_ratio=1.0,
                host_size=0,
                page_size=device_pool.page_size,
                layout="layer_first",
                pin_memory=memory == "pinned",
                device="cpu",
            )
        self.layer_ptrs = torch.tensor(
            [layer.data_ptr() for layer in self.kv_buffer],
            dtype=torch.uint64,
            device=device_pool.device,
        )

    @staticmethod
    def rows_for(num_slots: int, page_size: int) -> int:
        """Rows allocated for ``num_slots`` host slots: one page more, for padding."""
        return (num_slots // page_size + 1) * page_size

    def get_size_per_token(self) -> int:
        self.layer_num = self.device_pool.layer_num
        self.kv_cache_dim = self.device_pool.kv_cache_dim
        self.row_bytes = self.kv_cache_dim * self.dtype.itemsize
        return self.row_bytes * self.layer_num

    def init_kv_buffer(self) -> torch.Tensor:
        self._buffer = HostBuffer(
            self.size * self.size_per_token,
            self.memory,
            torch.device(self.device_pool.device),
            show_progress=self._show_progress,
        )
        return self._buffer.tensor.view(self.dtype).view(
            self.layer_num, self.size, 1, self.kv_cache_dim
        )

    def get_contiguous_buf_infos(self) -> tuple[list[int], list[int], list[int]]:
        """Addresses, lengths and page sizes in bytes, per layer, for the transfer engines."""
        pointers = [layer.data_ptr() for layer in self.kv_buffer]
        lengths = [layer.nbytes for layer in self.kv_buffer]
        return pointers, lengths, [self.row_bytes * self.page_size] * self.layer_num

    def miss_queue(self, max_batch: int, entries: int) -> MissQueue:
        """A queue of rows wanted from here, gathered in the order that suits the memory.

        Args:
            max_batch: requests in a batch, without padding.
            entries: of a request's top-k.
        """
        is_managed = self.memory == "managed"
        order_min_rows = ORDER_MIN_ROWS_MANAGED if is_managed else ORDER_MIN_ROWS
        device = self.device_pool.device
        return MissQueue(max_batch, entries, self.size, device, order_min_rows)

    def pages(self) -> np.ndarray:
        """The rows as ``[layer_num, pages, page bytes]`` uint8.

        For numpy to copy pages of: torch's indexing goes element by element.
        """
        rows = self.kv_buffer.view(torch.uint8)
        return rows.view(self.layer_num, -1, self.row_bytes * self.page_size).numpy()

    def close(self) -> None:
        """Give the memory back to the driver; idempotent. Nobody may read a row after it."""
        self._buffer.close()

    # HostKVCache asks for these; HiCache's page-wise traffic does not reach this pool.

    def load_to_device_per_layer(
        self, device_pool, host_indices, device_indices, layer_id, io_backend
    ):
        raise NotImplementedError("SparseCacheController.load_layer moves these rows")

    def backup_from_device_all_layer(
        self, device_pool, host_indices, device_indices, io_backend
    ):
        raise NotImplementedError("SparseCacheController.write_back moves these rows")

    def get_data_page(self, index, flat: bool = True):
        raise NotImplementedError("storage backends are not combined with offloading")

    def get_dummy_flat_data_page(self):
        raise NotImplementedError("storage backends are not combined with offloading")

    def set_from_flat_data_page(self, index, data_page):
        raise NotImplementedError("storage backends are not combined with offloading")


@contextmanager
def _without_words_of_another_feature():
    """While open, the base class does not log that the hierarchical cache takes memory."""

    def is_ours(record: logging.LogRecord) -> bool:
        return "hierarchical" not in record.getMessage()

    base = logging.getLogger(HostKVCache.__module__)
    base.addFilter(is_ours)
    try:
        yield
    finally:
        base.removeFilter(is_ours)


def check_host_memory(
    num_bytes: int,
    ranks_on_host: int,
    asked_by: str,
    retraction_bytes: int = 0,
    replicas: int = 1,
) -> None:
    """Refuse a host pool that the machine cannot hold; on all ranks of the server or on none.

    All ranks meet here before any of them takes its pool, so a late one does not count as used what
    the others have taken. The servers that ``--dp-size`` alone makes do not meet: each is held
    against what is free when it comes, and warned where not all of them would fit.

    Args:
        num_bytes: bytes of one rank's pool.
        ranks_on_host: every rank on this host takes its own copy.
        asked_by: the setting that led to the size, for the message.
        retraction_bytes: of one rank's retracted requests, taken while serving.
        replicas: servers on this host, of as many ranks each.

    Raises:
        ValueError: names the setting, the size and what is free.
    """
    free = _least_of_all_ranks(available_host_bytes()) - HOST_RESERVE_BYTES
    total = (num_bytes + retraction_bytes) * ranks_on_host
    if total > free:
        most = max(0, free // ranks_on_host - retraction_bytes)
        retracted = f", {retraction_bytes / 1e9:.2f} GB of each for retracted requests"
        raise ValueError(
            f"--enable-decode-nsa-kv-offload: {asked_by} needs "
            f"{total / 1e9:.2f} GB of host memory ({ranks_on_host} rank(s) on this host"
            f"{retracted if retraction_bytes else ''}), but {max(free, 0) / 1e9:.2f} GB are "
            f"free after a reserve of {HOST_RESERVE_BYTES / 1e9:.1f} GB. Set "
            f"--decode-nsa-kv-offload-config '{{\"host_size_gb\": N}}' with N at most "
            f"{most // 1e8 / 10:.1f}, or lower --max-total-tokens."
        )
    if total * replicas > free:
        logger.warning(
            "%d servers of --dp-size need %.2f GB of host memory together, and %.2f GB are free after "
            "a reserve of %.1f GB. Unless others of them have taken theirs already, they do not fit: "
            "lower host_size_gb in --decode-nsa-kv-offload-config.",
            replicas,
            total * replicas / 1e9,
            free / 1e9,
            HOST_RESERVE_BYTES / 1e9,
        )


def _least_of_all_ranks(num_bytes: int) -> int:
    """The least of what this server's ranks found; each of them must call it."""
    if not torch.distributed.is_initialized():
        return num_bytes
    least = torch.tensor(num_bytes, dtype=torch.int64)
    torch.distributed.all_reduce(
        least, op=torch.distributed.ReduceOp.MIN, group=get_world_group().cpu_group
    )
    return int(least)
