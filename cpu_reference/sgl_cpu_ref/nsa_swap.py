"""The CUDA kernels of ``sglang.jit_kernel.nsa_kv_offload``, their own source, on the CPU.

g++ compiles it against ``cuda_on_cpu/``; libraries are kept by the hash of what they were made from.
"""

import ctypes
import functools
import hashlib
import os
import shutil
import subprocess
import tempfile
from pathlib import Path

import torch

HERE = Path(__file__).resolve().parent / "cuda_on_cpu"
THREADS = 64
TABLE_PLACES = 64  # few, so that positions share places
# Instances that every library has; others are built when they are asked for.
ENTRIES, ROW_BYTES = (1, 2), (656, 1152)
ORDERS = {"forward": 0, "backward": 1, "chance": 2}


class KernelError(RuntimeError):
    """A kernel met no barrier together, or did not compile."""


class _MissQueue(ctypes.Structure):
    _fields_ = [
        *((name, ctypes.c_void_p) for name in ("host_slots", "device_slots", "wanted", "target", "state")),
        ("capacity", ctypes.c_int),
    ]


class _SwapParams(ctypes.Structure):
    _fields_ = (
        [
            (name, ctypes.c_void_p)
            for name in (
                "topk",
                "batch_windows",
                "request_rows",
                "seq_lens",
                "ring_begin",
                "req_to_token",
                "position_at_offset",
                "last_used",
                "counters",
                "page_table",
            )
        ]
        + [("queue", _MissQueue), ("row_stride", ctypes.c_int64)]
        + [(name, ctypes.c_int) for name in ("entries", "lasting", "lru_slots", "ring_slots", "first_window_slot", "window_slots")]
    )


class _GatherParams(ctypes.Structure):
    _fields_ = [
        ("host_rows", ctypes.c_void_p),
        ("device_rows", ctypes.c_void_p),
        ("queue", _MissQueue),
        ("num_host_rows", ctypes.c_int),
        ("order_min_rows", ctypes.c_int),
    ]


class _StoreParams(ctypes.Structure):
    _fields_ = [
        *((name, ctypes.c_void_p) for name in ("device_layers", "host_layers", "device_slots", "host_slots")),
        ("num_rows", ctypes.c_int),
        ("num_layers", ctypes.c_int),
    ]


class Kernels:
    """The three kernels, made from a folder of their sources.

    Args:
        sources: folder with ``swap.cuh``, ``gather.cuh`` and ``store.cuh``.
        order: in which threads of a block run between barriers: ``forward``, ``backward`` or ``chance``.
        seed: for ``chance``.
    """

    def __init__(self, sources: Path, order: str = "forward", seed: int = 0) -> None:
        self._sources = Path(sources)
        self._order, self._seed = ORDERS[order], seed

    def shared_bytes(self, entries: int, lru_slots: int) -> int:
        """Of a block of the swap."""
        return self._library().nsa_swap_shared_bytes(entries, lru_slots)

    def swap_module(self, top_k: int) -> "_Swap":
        entries = -(-top_k // THREADS)
        return _Swap(self._library(entries=entries), entries, self._order, self._seed)

    def gather_module(self, row_bytes: int) -> "_Gather":
        return _Gather(self._library(row_bytes=row_bytes), row_bytes, self._order, self._seed)

    def store_module(self, row_bytes: int) -> "_Store":
        return _Store(self._library(row_bytes=row_bytes), row_bytes, self._order, self._seed)

    def _library(self, entries: int = ENTRIES[0], row_bytes: int = ROW_BYTES[0]) -> ctypes.CDLL:
        files = [path for folder in (self._sources, HERE) for path in sorted(folder.rglob("*")) if path.is_file()]
        texts = [path.read_bytes() for path in files]
        digest = hashlib.sha256(b"\0".join(texts)).hexdigest()[:16]
        entries_list = ENTRIES if entries in ENTRIES else (*ENTRIES, entries)
        sizes = ROW_BYTES if row_bytes in ROW_BYTES else (*ROW_BYTES, row_bytes)
        return _build(self._sources, digest, _listed(entries_list), _listed(sizes))


def copy_with_fault(sources: Path, folder: Path, file: str, old: str, new: str) -> Path:
    """A copy of the kernels' sources in ``folder`` with a fault put in; LookupError where ``old`` is not in ``file``."""
    copy = Path(folder) / "sources"
    shutil.copytree(sources, copy)
    text = (copy / file).read_text()
    if old not in text:  # no AssertionError: that is what callers expect of a fault
        raise LookupError(f"{file} has no {old!r}")
    (copy / file).write_text(text.replace(old, new))
    return copy


class _Swap:
    def __init__(self, library, size: int, order: int, seed: int) -> None:
        self._library, self._size, self._order, self._seed = library, size, order, seed

    def run(self, topk, windows, rows, seq_lens, ring_begin, req_to_token, *rest) -> None:
        position_at, last_used, counters, page_table, *queue = rest[:-4]
        lasting, ring_slots, first_window_slot, window_slots = rest[-4:]
        _check_contiguous(topk, windows, rows, seq_lens, position_at, last_used, page_table)
        _check_dtype(torch.int32, topk, windows, rows, seq_lens, ring_begin, req_to_token, position_at, page_table)
        _check_dtype(torch.int16, last_used)
        if last_used.shape[1] % 4:
            raise KernelError(f"{last_used.shape[1]} LRU slots are no multiple of 4")
        tensors = (topk, windows, rows, seq_lens, ring_begin, req_to_token, position_at, last_used, counters)
        params = _SwapParams(
            *(tensor.data_ptr() for tensor in (*tensors, page_table)),
            _queue(queue),
            req_to_token.stride(0),
            topk.shape[1],
            lasting,
            last_used.shape[1],
            ring_slots,
            first_window_slot,
            window_slots,
        )
        _call(self._library.nsa_swap, self._size, params, topk.shape[0], self._order, self._seed)


class _Gather:
    def __init__(self, library, size: int, order: int, seed: int) -> None:
        self._library, self._size, self._order, self._seed = library, size, order, seed

    def run(self, host_rows, device_rows, *rest) -> None:
        *queue, order_min_rows, blocks = rest
        _check_contiguous(host_rows, device_rows)
        params = _GatherParams(
            host_rows.data_ptr(), device_rows.data_ptr(), _queue(queue), host_rows.shape[0], order_min_rows
        )
        _call(self._library.nsa_gather, self._size, params, min(blocks, 3), self._order, self._seed)


class _Store:
    def __init__(self, library, size: int, order: int, seed: int) -> None:
        self._library, self._size, self._order, self._seed = library, size, order, seed

    def run(self, device_layers, host_layers, device_slots, host_slots, blocks) -> None:
        _check_contiguous(device_layers, host_layers, device_slots, host_slots)
        _check_dtype(torch.uint64, device_layers, host_layers)
        _check_dtype(torch.int64, device_slots, host_slots)
        if device_slots.shape != host_slots.shape or device_layers.shape != host_layers.shape:
            raise KernelError("slots or layers of two lengths")
        tensors = (device_layers, host_layers, device_slots, host_slots)
        params = _StoreParams(*(tensor.data_ptr() for tensor in tensors), len(host_slots), len(host_layers))
        _call(self._library.nsa_store, self._size, params, min(blocks, 3), self._order, self._seed)


def _queue(tensors) -> _MissQueue:
    return _MissQueue(*(tensor.data_ptr() for tensor in tensors), len(tensors[0]) // 2)


def _check_contiguous(*tensors) -> None:
    for tensor in tensors:
        if not tensor.is_contiguous():
            raise KernelError(f"a tensor of shape {tuple(tensor.shape)} is not contiguous")


def _check_dtype(dtype, *tensors) -> None:
    for tensor in tensors:
        if tensor.dtype != dtype:
            raise KernelError(f"a tensor of shape {tuple(tensor.shape)} is {tensor.dtype}, not {dtype}")


def _call(function, size: int, params, *args) -> None:
    function.restype = ctypes.c_char_p
    error = function(size, ctypes.byref(params), *args)
    if error is not None:
        raise KernelError(error.decode())


def _listed(values) -> str:
    return ",".join(map(str, values))


@functools.cache
def _build(sources: Path, digest: str, entries: str, row_bytes: str) -> ctypes.CDLL:
    folder = Path(tempfile.gettempdir()) / f"cuda_on_cpu-{os.getuid()}"
    folder.mkdir(mode=0o700, exist_ok=True)
    library = folder / f"{digest}-{entries}-{row_bytes}.so"
    if not library.exists():
        made = library.with_suffix(f".{os.getpid()}")
        command = ["g++", "-std=c++20", "-O1", "-shared", "-fPIC", "-U_FORTIFY_SOURCE", f"-I{sources}", f"-I{HERE}"]
        command += [f"-DENTRIES={entries}", f"-DROW_BYTES={row_bytes}"]
        command += [f"-DTABLE_PLACES={TABLE_PLACES}", str(HERE / "nsa_kv_offload.cpp"), "-o", str(made)]
        run = subprocess.run(command, capture_output=True, text=True)
        if run.returncode:
            raise KernelError(run.stderr)
        made.rename(library)
    return ctypes.CDLL(str(library))


def install(order: str = "forward") -> None:
    """Put these in place of the compiled modules of ``sglang.jit_kernel.nsa_kv_offload``."""
    from sglang.jit_kernel import nsa_kv_offload
    from sglang.jit_kernel.utils import KERNEL_PATH

    made = Kernels(KERNEL_PATH / "csrc" / "nsa_kv_offload", order)
    nsa_kv_offload._swap_module = made.swap_module
    nsa_kv_offload._gather_module = made.gather_module
    nsa_kv_offload._store_module = made.store_module
