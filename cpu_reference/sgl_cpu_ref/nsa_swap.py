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
ORDERS = {"forward": 0, "backward": 1, "chance": 2}


class KernelError(RuntimeError):
    """A kernel met no barrier together, or did not compile."""


class _MissQueue(ctypes.Structure):
    _fields_ = [(name, ctypes.c_void_p) for name in ("host_slots", "device_slots", "wanted", "target", "state")]


class _SwapParams(ctypes.Structure):
    _fields_ = (
        [
            (name, ctypes.c_void_p)
            for name in (
                "topk",
                "batch_windows",
                "batch_rows",
                "seq_lens",
                "ring_begin",
                "req_to_token",
                "offset_of_position",
                "position_at_offset",
                "last_used",
                "counters",
                "page_table",
            )
        ]
        + [("queue", _MissQueue), ("row_stride", ctypes.c_int64), ("context", ctypes.c_int64)]
        + [(name, ctypes.c_int) for name in ("k", "lru_slots", "ring_slots", "first_window_slot", "window_slots")]
    )


class _GatherParams(ctypes.Structure):
    _fields_ = [
        ("host_rows", ctypes.c_void_p),
        ("device_rows", ctypes.c_void_p),
        ("queue", _MissQueue),
        ("num_host_rows", ctypes.c_int),
    ]


class Kernels:
    """The two kernels, made from a folder of their sources.

    Args:
        sources: folder with ``swap.cuh`` and ``gather.cuh``.
        order: in which threads of a block run between barriers: ``forward``, ``backward`` or ``chance``.
        seed: for ``chance``.
    """

    def __init__(self, sources: Path, order: str = "forward", seed: int = 0) -> None:
        self._sources = Path(sources)
        self._order, self._seed = ORDERS[order], seed

    def swap_module(self, top_k: int) -> "_Swap":
        return _Swap(self._library(entries=-(-top_k // THREADS)), self._order, self._seed)

    def gather_module(self, row_bytes: int) -> "_Gather":
        return _Gather(self._library(row_bytes=row_bytes), self._order, self._seed)

    def _library(self, entries: int = 1, row_bytes: int = 16) -> ctypes.CDLL:
        texts = [path.read_bytes() for folder in (self._sources, HERE) for path in sorted(folder.iterdir())]
        return _build(self._sources, hashlib.sha256(b"\0".join(texts)).hexdigest()[:16], entries, row_bytes)


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
    def __init__(self, library, order: int, seed: int) -> None:
        self._library, self._order, self._seed = library, order, seed

    def run(self, topk, windows, rows, seq_lens, ring_begin, req_to_token, *rest) -> None:
        offset_of, position_at, last_used, counters, page_table, *queue = rest[:-4]
        ordered, ring_slots, first_window_slot, window_slots = rest[-4:]
        _check_contiguous(topk, windows, rows, seq_lens, offset_of, position_at, last_used, page_table)
        tensors = (topk, windows, rows, seq_lens, ring_begin, req_to_token, offset_of, position_at, last_used, counters)
        params = _SwapParams(
            *(tensor.data_ptr() for tensor in (*tensors, page_table)),
            _queue(queue, ordered),
            req_to_token.stride(0),
            offset_of.shape[1],
            topk.shape[1],
            last_used.shape[1],
            ring_slots,
            first_window_slot,
            window_slots,
        )
        wide = int(seq_lens.dtype == torch.int64)
        _call(self._library.nsa_swap, params, seq_lens.data_ptr(), wide, topk.shape[0], self._order, self._seed)


class _Gather:
    def __init__(self, library, order: int, seed: int) -> None:
        self._library, self._order, self._seed = library, order, seed

    def run(self, host_rows, device_rows, *rest) -> None:
        *queue, ordered, blocks = rest
        _check_contiguous(host_rows, device_rows)
        params = _GatherParams(
            host_rows.data_ptr(), device_rows.data_ptr(), _queue(queue, ordered), host_rows.shape[0]
        )
        _call(self._library.nsa_gather, params, min(blocks, 3), self._order, self._seed)


def _queue(tensors, ordered: bool) -> _MissQueue:
    host_slots, device_slots, wanted, target, state = (tensor.data_ptr() for tensor in tensors)
    return _MissQueue(host_slots, device_slots, wanted if ordered else None, target, state)


def _check_contiguous(*tensors) -> None:
    for tensor in tensors:
        if not tensor.is_contiguous():
            raise KernelError(f"a tensor of shape {tuple(tensor.shape)} is not contiguous")


def _call(function, params, *args) -> None:
    function.restype = ctypes.c_char_p
    first, *rest = args
    pointer = ctypes.c_void_p(first) if function.__name__ == "nsa_swap" else first
    error = function(ctypes.byref(params), pointer, *rest)
    if error is not None:
        raise KernelError(error.decode())


@functools.cache
def _build(sources: Path, digest: str, entries: int, row_bytes: int) -> ctypes.CDLL:
    folder = Path(tempfile.gettempdir()) / f"cuda_on_cpu-{os.getuid()}"
    folder.mkdir(mode=0o700, exist_ok=True)
    library = folder / f"{digest}-{entries}-{row_bytes}.so"
    if not library.exists():
        made = library.with_suffix(f".{os.getpid()}")
        command = ["g++", "-std=c++20", "-O3", "-shared", "-fPIC", "-U_FORTIFY_SOURCE", f"-I{sources}"]
        command += [f"-DENTRIES={entries}", f"-DROW_BYTES={row_bytes}", str(HERE / "nsa_kv_offload.cpp"), "-o", str(made)]
        run = subprocess.run(command, capture_output=True, text=True)
        if run.returncode:
            raise KernelError(run.stderr)
        made.rename(library)
    return ctypes.CDLL(str(library))


def install() -> None:
    """Put these in place of the compiled modules of ``sglang.jit_kernel.nsa_kv_offload``."""
    from sglang.jit_kernel import nsa_kv_offload
    from sglang.jit_kernel.utils import KERNEL_PATH

    made = Kernels(KERNEL_PATH / "csrc" / "nsa_kv_offload")
    nsa_kv_offload._swap_module = made.swap_module
    nsa_kv_offload._gather_module = made.gather_module
