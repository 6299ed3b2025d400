"""Environment and paths that SGLang needs on a CPU; with ``HARNESS_DEVICE=cuda``, on a GPU."""

import os
import sys
from pathlib import Path
from typing import Dict, Optional

ROOT = Path(__file__).resolve().parents[2]
REFERENCE = ROOT / "cpu_reference"
MODELS = ROOT / "build" / "models"
PATCHED = ROOT / "build" / "sglang" / "python"

ON_GPU = os.environ.get("HARNESS_DEVICE") == "cuda"
"""On a GPU the installed kernels serve: neither stubs nor reference kernels are put in front of them."""

DEFAULTS = {
    "SGLANG_USE_CPU_ENGINE": "1",
    "TRITON_INTERPRET": "1",
    "TORCHDYNAMO_DISABLE": "1",
    "HF_HUB_OFFLINE": "1",
    "TRANSFORMERS_OFFLINE": "1",
    "TOKENIZERS_PARALLELISM": "false",
    "SGLANG_ENABLE_STRICT_MEM_CHECK_DURING_IDLE": "1",
    "OMP_NUM_THREADS": "1",
}
"""Set unless the caller's environment says otherwise. TRITON_INTERPRET must stand before triton's first import. One OpenMP
thread: more make the tiny model no faster, and many times slower where other processes want the cores."""
if ON_GPU:
    for _name in ("SGLANG_USE_CPU_ENGINE", "TRITON_INTERPRET", "TORCHDYNAMO_DISABLE"):
        del DEFAULTS[_name]


def prepare() -> None:
    """Set the defaults and make the stubs, the plugin and, where it is built, the patched sglang importable here.

    ``STOCK_SGLANG=1`` in the environment leaves the patched tree out.
    """
    for name, value in DEFAULTS.items():
        os.environ.setdefault(name, value)
    for path in reversed(python_path()):
        if path not in sys.path:
            sys.path.insert(0, path)
    if ON_GPU and str(REFERENCE) not in sys.path:
        sys.path.append(str(REFERENCE))  # the checkpoint maker, behind the real kernels


def python_path() -> list:
    """Folders in front of the installed packages, most important first."""
    path = [] if ON_GPU else [str(REFERENCE)]
    if PATCHED.is_dir() and os.environ.get("STOCK_SGLANG") != "1":
        path.append(str(PATCHED))
    return path


def child_environment(**extra: Optional[str]) -> Dict[str, str]:
    """Environment of a server process; ``extra`` overrides it, None removes a variable."""
    env = {**DEFAULTS, **os.environ}
    path = python_path()
    inherited = env.get("PYTHONPATH", "").split(os.pathsep)
    env["PYTHONPATH"] = os.pathsep.join(path + [p for p in inherited if p and p not in path])
    env.update(extra)
    return {name: value for name, value in env.items() if value is not None}
