"""Host memory that the device can address: the bytes asked for, given back on exit."""

from __future__ import annotations

import ctypes
import logging
import mmap
import os
import time
import weakref
from concurrent.futures import ThreadPoolExecutor
from typing import Callable, Optional

import torch
from tqdm import tqdm

from sglang.srt.arg_groups.nsa_kv_offload_hook import FLAG
from sglang.srt.mem_cache.sparsity.nsa_offload.config import CONFIG_FLAG, HOST_MEMORY
from sglang.srt.mem_cache.sparsity.nsa_offload.host_limits import (
    free_huge_bytes,
    locked_memory_limit,
)

logger = logging.getLogger(__name__)

MEMORY_KINDS = (*HOST_MEMORY, "plain")
MANAGED_PAGE_BYTES = 2 << 20
# One registration over 512 GiB fails on some drivers.
PIN_CHUNK_BYTES = 16 << 30
CUDA_NOT_SUPPORTED = 801
# A page is there once it is touched, and the device maps a managed one then. Several threads do
# it ahead; a piece is also the step of the progress bar.
TOUCH_PIECE_BYTES = 64 << 20
MAX_TOUCH_THREADS = 8
# Left to the operating system and to other processes, as SGLang's own host pools do.
HOST_RESERVE_BYTES = 10 << 30

# Managed memory of one rank has run up to this size (benchmark/kv_offload/results/h200/host_memory.json);
# above it pinned memory is the default.
MANAGED_MAX_BYTES = 96 * 10**9


def memory_for(
    device: torch.device, num_bytes: int, registered: bool, asked: Optional[str] = None
) -> str:
    """The kind of host memory that suits a pool, one of ``MEMORY_KINDS``; logs which, and why.

    Managed memory that stays on the host, since the GPU reads scattered rows of it at the link's
    rate, and of pinned memory at the rate at which it translates their addresses. Pinned memory
    where a transfer engine registers the pool, since network cards do not take managed memory,
    where the GPU cannot share managed memory with the CPU, and above ``MANAGED_MAX_BYTES``.

    Args:
        device: of the latent rows' windows.
        num_bytes: of the pool.
        registered: whether a transfer engine registers the pool.
        asked: "managed" or "pinned" to leave nothing to choose; None otherwise.
    """
    if device.type == "cpu":
        return "plain"
    memory, why, other = asked, "as asked for", None
    if asked is None and registered:
        memory, why = "pinned", "a network card registers it"
    elif asked is None:
        hindrance = _no_managed_memory(device)
        if hindrance is not None:
            memory, why = "pinned", f"{hindrance}; scattered rows are read more slowly"
        elif num_bytes > MANAGED_MAX_BYTES:
            memory, other = "pinned", "managed"
            why = f"managed memory, which is read faster, has run up to {MANAGED_MAX_BYTES / 1e9:.0f} GB"
        else:
            memory, why, other = "managed", "scattered rows of it are read fastest", "pinned"
    choice = f'; {{"host_memory": "{other}"}} in {CONFIG_FLAG} chooses otherwise' if other else ""
    logger.info("%.2f GB of host memory are %s: %s%s.", num_bytes / 1e9, memory, why, choice)
    if memory == "managed":
        _warn_of_fragments(num_bytes)
    return memory


def _warn_of_fragments(num_bytes: int) -> None:
    huge = free_huge_bytes()
    if huge is not None and huge < num_bytes:
        logger.warning(
            "Free host memory is in fragments: %.2f GB of it in blocks of 2 MB or more, for %.2f GB of "
            "managed memory. The GPU maps the rest in small pages and reads rows of it more slowly; "
            "`echo 1 > /proc/sys/vm/compact_memory`, or a restart of the machine, joins them.",
            huge / 1e9,
            num_bytes / 1e9,
        )


def _no_managed_memory(device: torch.device) -> Optional[str]:
    """Why managed memory cannot be had; None where it can. Leaves no CUDA error behind."""
    try:
        from cuda.bindings import runtime
    except ImportError as error:
        return f"cuda.bindings cannot be imported ({error})"
    if not hasattr(runtime, "cudaMemLocation"):
        return "cuda-bindings 13 or newer is needed for managed memory"
    code, shares = runtime.cudaDeviceGetAttribute(
        runtime.cudaDeviceAttr.cudaDevAttrConcurrentManagedAccess, _index(device)
    )
    if int(code) != 0:
        runtime.cudaGetLastError()
        return f"CUDA does not say whether the GPU shares managed memory (code {int(code)})"
    return None if shares else "the GPU cannot share managed memory with the CPU"


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
            mapping = _private(nbytes)
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
                f"cudaHostRegister failed with code {code} at {start / 1e9:.1f} of {nbytes / 1e9:.1f} GB "
                f"of pinned host memory, of which every rank of the host takes as much. {_remedy(code)}"
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


def _private(nbytes: int) -> mmap.mmap:
    """Anonymous memory in huge pages where the kernel has them, which are cleared and pinned faster.

    Shared memory, mmap's default, gets none. A fork leaves it to this process: what is registered
    must not be copied on write.
    """
    mapping = mmap.mmap(-1, nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    for advice in (mmap.MADV_HUGEPAGE, mmap.MADV_DONTFORK):
        try:
            mapping.madvise(advice)
        except OSError as error:  # a kernel without huge pages
            logger.warning("madvise of host memory failed: %s", error)
    return mapping


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


def _remedy(code: int) -> str:
    """What helps where memory cannot be registered."""
    if code == CUDA_NOT_SUPPORTED:
        return (
            "This machine does not let memory be registered, as confidential virtual machines do not; "
            f'give {{"host_memory": "managed"}} in {CONFIG_FLAG}, or drop {FLAG}.'
        )
    return (
        f"Locked memory is limited to {locked_memory_limit()} (`ulimit -l`; in a container "
        f"`--ulimit memlock=-1`): raise that, or lower host_size_gb in {CONFIG_FLAG}."
    )


def _check(runtime, call: str, code: int, nbytes: int) -> None:
    if int(code) == 0:
        return
    runtime.cudaGetLastError()  # the next launch would find it
    raise RuntimeError(
        f"{call} failed with code {int(code)} for {nbytes / 1e9:.2f} GB of managed host memory; "
        f"lower host_size_gb in {CONFIG_FLAG}, or add \"host_memory\": \"pinned\"."
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
