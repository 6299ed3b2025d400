"""Pinned host memory: exactly the bytes asked for, in chunks, given back on exit."""

from __future__ import annotations

import logging
import mmap
import os
import time
import weakref
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import psutil
import torch
from tqdm import tqdm

logger = logging.getLogger(__name__)

# One registration over 512 GiB fails on some drivers.
PIN_CHUNK_BYTES = 16 << 30
# The kernel clears a page when it is first touched. Registration would touch all of them from
# one thread, so threads do it before; a piece is also the step of the progress bar.
TOUCH_PIECE_BYTES = 64 << 20
MAX_TOUCH_THREADS = 8
# Left to the operating system and to other processes, as SGLang's own host pools do.
HOST_RESERVE_BYTES = 10 << 30

_CGROUP_LIMITS = (
    ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory.current"),
    (
        "/sys/fs/cgroup/memory/memory.limit_in_bytes",
        "/sys/fs/cgroup/memory/memory.usage_in_bytes",
    ),
)


def available_host_bytes() -> int:
    """Bytes this process may still take: the machine's free memory within its cgroup limit.

    The reserve for other processes is not subtracted.
    """
    available = psutil.virtual_memory().available
    for limit_file, usage_file in _CGROUP_LIMITS:
        try:
            limit = Path(limit_file).read_text().strip()
            usage = int(Path(usage_file).read_text())
        except (OSError, ValueError):
            continue
        if limit != "max":
            available = min(available, max(0, int(limit) - usage))
    return available


class PinnedBuffer:
    """Page-aligned, zeroed host memory that the device can address.

    A plain anonymous mapping takes exactly ``nbytes`` (the caching pinned allocator of torch
    rounds up to a power of two) and starts as zeros, so a row that was never written decodes
    to zeros and not to NaN.

    Args:
        nbytes: size; above zero.
        pin: register with CUDA; False on a machine without it.
        chunk_bytes: size of one registration.
        show_progress: draw a bar while pinning.

    Raises:
        RuntimeError: a registration failed; earlier ones are rolled back.
    """

    def __init__(
        self,
        nbytes: int,
        pin: bool,
        chunk_bytes: int = PIN_CHUNK_BYTES,
        show_progress: bool = False,
    ):
        self._mapping = mmap.mmap(-1, nbytes)
        self.tensor = torch.frombuffer(self._mapping, dtype=torch.uint8)
        self._registered: list[int] = []
        if pin:
            start = time.perf_counter()
            self._register(nbytes, chunk_bytes, show_progress)
            logger.info(
                "Pinned %.2f GB of host memory in %.1f s.",
                nbytes / 1e9,
                time.perf_counter() - start,
            )
        # Runs when the buffer is dropped, and at exit: a process that ends with memory still
        # registered holds the device until the driver has cleaned up.
        self._finalizer = weakref.finalize(self, _unregister, self._registered)

    def _register(self, nbytes: int, chunk_bytes: int, show_progress: bool) -> None:
        cudart = torch.cuda.cudart()
        base = self.tensor.data_ptr()
        bar = tqdm(
            total=nbytes,
            desc="Pin host memory",
            unit="B",
            unit_scale=True,
            mininterval=1.0,
            disable=not show_progress,
        )
        with bar, ThreadPoolExecutor(_touch_threads()) as pool:
            for start in range(0, nbytes, chunk_bytes):
                size = min(chunk_bytes, nbytes - start)
                pieces = range(start, start + size, TOUCH_PIECE_BYTES)
                ends = [min(piece + TOUCH_PIECE_BYTES, start + size) for piece in pieces]
                for touched in pool.map(self._touch, pieces, ends):
                    bar.update(touched)
                code = int(cudart.cudaHostRegister(base + start, size, 0))
                if code != 0:
                    _unregister(self._registered)
                    _clear_cuda_error()
                    raise RuntimeError(
                        f"cudaHostRegister failed with code {code} at {start / 1e9:.1f} of "
                        f"{nbytes / 1e9:.1f} GB; check `ulimit -l` and free host memory."
                    )
                self._registered.append(base + start)

    def _touch(self, start: int, end: int) -> int:
        """Write to each page of ``[start, end)``, all zeros before and after; returns its bytes."""
        self.tensor.numpy()[start : end : mmap.PAGESIZE] = 0  # without the interpreter's lock
        return end - start

    def close(self) -> None:
        """Unregister; safe to call twice. The memory itself lives until its views are gone."""
        self._finalizer()


def _touch_threads() -> int:
    """Cores of this process: it is bound to the GPU's NUMA node, and so are its pages."""
    return min(MAX_TOUCH_THREADS, len(os.sched_getaffinity(0)))


def _unregister(addresses: list[int]) -> None:
    while addresses:
        torch.cuda.cudart().cudaHostUnregister(addresses.pop())


def _clear_cuda_error() -> None:
    """Consume the error a failed registration leaves for the next kernel launch to find."""
    get_last_error = getattr(torch.cuda.cudart(), "cudaGetLastError", None)
    if get_last_error is not None:
        get_last_error()
