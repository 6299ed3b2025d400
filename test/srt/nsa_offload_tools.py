"""What tests of decode KV offloading share: the device, the kernels where there is no GPU, and faults put into modules."""

import importlib.util
import inspect
import os
import shutil
import sys
import tempfile
import unittest
from pathlib import Path
from types import ModuleType

import torch

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
if DEVICE == "cpu":
    os.environ.setdefault("SGLANG_USE_CPU_ENGINE", "1")


def need_kernels() -> None:
    """Without a GPU, put the kernels' source compiled for the CPU in their place, until the module's tests end.

    Skips where that is not installed. To be called from ``setUpModule``.
    """
    if DEVICE == "cuda":
        return
    try:
        from sgl_cpu_ref import nsa_swap
    except ImportError:
        raise unittest.SkipTest("needs a GPU") from None
    if shutil.which("g++") is None:
        raise unittest.SkipTest("needs a GPU or g++")
    from sglang.jit_kernel import nsa_kv_offload

    for name in ("_swap_module", "_gather_module", "_store_module"):
        unittest.addModuleCleanup(setattr, nsa_kv_offload, name, getattr(nsa_kv_offload, name))
    nsa_swap.install(order="chance")


_FOLDER = tempfile.TemporaryDirectory()


def mutated(module: ModuleType, old: str, new: str) -> ModuleType:
    """A copy of a module with a fault put in; ``old`` must occur in its source."""
    source = inspect.getsource(module)
    if old not in source:  # no AssertionError: that is what callers expect of a fault
        raise LookupError(f"{module.__name__} has no {old!r}")
    name = f"mutated_{len(os.listdir(_FOLDER.name))}"
    path = Path(_FOLDER.name, f"{name}.py")
    path.write_text(source.replace(old, new))
    spec = importlib.util.spec_from_file_location(name, path)
    copy = sys.modules[name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(copy)
    return copy
