"""Host memory that the device can address: the bytes asked for, given back on exit."""

from __future__ import annotations

import ctypes
import logging
import mmap
import os
import time
import weakref
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Callable, Optional

import psutil
import torch
from tqdm import tqdm

from sglang.srt.mem_cache.sparsity.nsa_offload.config import HOST_MEMORY

logger = logging.getLogger(__name__)

MEMORY_KINDS = (*HOST_MEMORY, "plain")
MANAGED_PAGE_BYTES = 2 << 20
# One registration over 512 GiB fails on some drivers.
PIN_CHUNK_BYTES = 16 << 30
# A page is there once it is touched, and the device maps a managed one then. Several threads do
# it ahead; a piece is also the step of the progress bar.
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


def memory_for(device: torch.device, registered: bool, asked: Optional[str] = None) -> str:
    """The kind of host memory that suits a pool, one of ``MEMORY_KINDS``.

    Managed memory that stays on the host, since the GPU reads scattered rows of it at the link's
    rate, and of pinned memory at the rate at which it translates their addresses. Pinned memory
    where a transfer engine registers the pool, since network cards do not take managed memory,
    and where the GPU cannot share managed memory with the CPU.

    Args:
        device: of the latent rows' windows.
        registered: whether a transfer engine registers the pool.
        asked: "managed" or "pinned" to leave nothing to choose; None otherwise.
    """
    if device.type == "cpu":
        return "plain"
    if asked is not None:
        return asked
    if registered:
        return "pinned"
    if not _shares_managed_memory(device):
        logger.warning(
            "The GPU cannot share managed memory with the CPU: host memory is pinned, and "
            "scattered rows are read more slowly."
        )
        return "pinned"
    return "managed"


def _shares_managed_memory(device: torch.device) -> bool:
    from cuda.bindings import runtime

    code, shares = runtime.cudaDeviceGetAttribute(
        runtime.cudaDeviceAttr.cudaDevAttrConcurrentManagedAccess, _index(device)
    )
    return int(code) == 0 and bool(shares)


class HostBuffer:
    """Page-aligned, zeroed host memory that the device can address.

    It takes ``nbytes``, managed memory in whole pages of 2 MB (the caching pinned allocator of
    torch rounds up to a power of two), and starts as zeros, so a row that was never written
    decodes to zeros and not to NaN.

    Args:
        nbytes: size; above zero.
        memory: "managed" memory stays on the host and is mapped by the device, as FBGEMM's
            ``new_managed_tensor`` is; "pinned" memory is registered with CUDA; "plain" memory is
            for machines without it.
        device: that maps managed memory.
        chunk_bytes: size of one registration.
        show_progress: draw a bar while the memory is made.

    Raises:
        RuntimeError: CUDA refused; what it had given is given back.
        ValueError: an unknown kind of memory.
    """

    def __init__(
        self,
        nbytes: int,
        memory: str,
        device: torch.device = torch.device("cuda"),
        chunk_bytes: int = PIN_CHUNK_BYTES,
        show_progress: bool = False,
    ):
        if memory not in MEMORY_KINDS:
            raise ValueError(f"memory={memory!r} is none of {MEMORY_KINDS}.")
        self.memory = memory
        self._given: list[tuple[Callable, int]] = []  # how to give back, and what
        if memory == "managed":
            mapping = _managed(nbytes, device, self._given)
        else:
            mapping = mmap.mmap(-1, nbytes)
        self.tensor = torch.frombuffer(mapping, dtype=torch.uint8)
        # Runs when the buffer is dropped (the last view of managed memory, which is gone then), and
        # at exit: a process that ends with memory still registered holds the device until the
        # driver has cleaned up.
        owner = mapping if memory == "managed" else self
        self._finalizer = weakref.finalize(owner, _give_back, self._given)
        if memory != "plain":
            start = time.perf_counter()
            try:
                self._fill(nbytes, chunk_bytes, show_progress)
            except BaseException:
                self.close()
                raise
            logger.info(
                "Took %.2f GB of %s host memory in %.1f s.",
                nbytes / 1e9,
                memory,
                time.perf_counter() - start,
            )

    def _fill(self, nbytes: int, chunk_bytes: int, show_progress: bool) -> None:
        """Touch all pages, and register them where they are to be pinned."""
        base = self.tensor.data_ptr()
        bar = tqdm(
            total=nbytes,
            desc="Take host memory",
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
                if self.memory == "pinned":
                    self._register(base + start, size, start, nbytes)

    def _register(self, address: int, size: int, start: int, nbytes: int) -> None:
        code = int(torch.cuda.cudart().cudaHostRegister(address, size, 0))
        if code != 0:
            _clear_cuda_error()
            raise RuntimeError(
                f"cudaHostRegister failed with code {code} at {start / 1e9:.1f} of "
                f"{nbytes / 1e9:.1f} GB; check `ulimit -l` and free host memory."
            )
        self._given.append((torch.cuda.cudart().cudaHostUnregister, address))

    def _touch(self, start: int, end: int) -> int:
        """Write zeros to each page of ``[start, end)``; returns its bytes.

        The kernel clears the pages of a mapping; CUDA does not promise it of managed memory.
        """
        step = 1 if self.memory == "managed" else mmap.PAGESIZE
        self.tensor.numpy()[start:end:step] = 0  # without the interpreter's lock
        return end - start

    def close(self) -> None:
        """Give the memory back now; safe to call twice.

        Managed memory is gone then, and nobody may read its views; other memory lives until its
        views are gone.
        """
        self._finalizer()


def _managed(nbytes: int, device: torch.device, given: list) -> ctypes.Array:
    """Managed memory that is to stay on the host, mapped by the device as soon as it is touched."""
    from cuda.bindings import runtime

    # Smaller pieces share pages, which are neither aligned nor zeros when they are used again.
    size = -(-nbytes // MANAGED_PAGE_BYTES) * MANAGED_PAGE_BYTES
    code, address = runtime.cudaMallocManaged(size, runtime.cudaMemAttachGlobal)
    _check(runtime, "cudaMallocManaged", code, nbytes)
    given.append((runtime.cudaFree, address))
    places = runtime.cudaMemLocationType
    try:
        for name, place, index in (
            ("SetPreferredLocation", places.cudaMemLocationTypeHost, 0),
            ("SetAccessedBy", places.cudaMemLocationTypeDevice, _index(device)),
        ):
            location = runtime.cudaMemLocation()
            location.type, location.id = place, index
            advice = getattr(runtime.cudaMemoryAdvise, f"cudaMemAdvise{name}")
            (code,) = runtime.cudaMemAdvise(address, size, advice, location)
            _check(runtime, "cudaMemAdvise", code, nbytes)
        # A fork would unmap the pages here as well (FBGEMM's uvm_mem_advice_dont_fork).
        libc = ctypes.CDLL(None, use_errno=True)
        if libc.madvise(ctypes.c_void_p(address), ctypes.c_size_t(size), mmap.MADV_DONTFORK):
            logger.warning("madvise failed: %s", os.strerror(ctypes.get_errno()))
    except BaseException:
        _give_back(given)
        raise
    return (ctypes.c_uint8 * nbytes).from_address(address)


def _check(runtime, call: str, code: int, nbytes: int) -> None:
    if int(code) == 0:
        return
    runtime.cudaGetLastError()  # the next launch would find it
    raise RuntimeError(
        f"{call} failed with code {int(code)} for {nbytes / 1e9:.2f} GB of managed host memory; "
        "lower host_size_gb in --decode-nsa-kv-offload-config, or add \"host_memory\": \"pinned\"."
    )


def _index(device: torch.device) -> int:
    return torch.cuda.current_device() if device.index is None else device.index


def _touch_threads() -> int:
    """Cores of this process: it is bound to the GPU's NUMA node, and so are its pages."""
    return min(MAX_TOUCH_THREADS, len(os.sched_getaffinity(0)))


def _give_back(given: list[tuple[Callable, int]]) -> None:
    while given:
        free, address = given.pop()
        free(address)


def _clear_cuda_error() -> None:
    """Consume the error a failed registration leaves for the next kernel launch to find."""
    get_last_error = getattr(torch.cuda.cudart(), "cudaGetLastError", None)
    if get_last_error is not None:
        get_last_error()
