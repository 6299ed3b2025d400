"""The CUDA sources compile for Hopper, and keep their values in registers."""

import re
import shutil
import subprocess
from pathlib import Path

import pytest

SGLANG = Path(__file__).resolve().parents[2] / "build" / "sglang" / "python" / "sglang"
INSTANCES = (
    "Swap<1024, 2>",  # DeepSeek-V3.2's top-k
    "Gather<512, 656, 4>",  # fp8 rows
    "Gather<512, 1152, 4>",  # bf16 rows
)


@pytest.mark.skipif(shutil.which("nvcc") is None, reason="needs nvcc")
def test_swap_kernels_compile_without_spills(tmp_path):
    import tvm_ffi

    source = tmp_path / "instances.cu"
    lines = ['#include "nsa_kv_offload/launch.cuh"']
    lines += [f"template struct nsa_kv_offload::{name};" for name in INSTANCES]
    source.write_text("\n".join(lines))
    kernels = SGLANG / "jit_kernel"
    includes = [kernels / "csrc", kernels / "include", Path(tvm_ffi.__file__).parent / "include"]
    command = ["nvcc", "-std=c++20", "-O3", "--expt-relaxed-constexpr", "-gencode=arch=compute_90,code=sm_90"]
    command += ["-DSGL_CUDA_ARCH=900", "-Xptxas", "-v", *(f"-I{path}" for path in includes)]
    run = subprocess.run([*command, "-c", str(source), "-o", str(tmp_path / "out.o")], capture_output=True, text=True)
    assert run.returncode == 0, run.stderr
    assert "warning" not in run.stderr
    stacks = re.findall(r"(\d+) bytes stack frame, (\d+) bytes spill stores", run.stderr)
    assert len(stacks) == len(INSTANCES) + 1  # two types of lengths
    assert all(pair == ("0", "0") for pair in stacks), run.stderr
