"""The CUDA sources compile for Hopper, and keep their values in registers."""

import re
import shutil
import subprocess
from pathlib import Path

import pytest

SGLANG = Path(__file__).resolve().parents[2] / "build" / "sglang" / "python" / "sglang"
INSTANCES = (
    "Swap<1024, 2, 32768>",  # DeepSeek-V3.2's top-k
    "Swap<1024, 4, 32768>",  # two lists of it; of more, values spill to the stack
    "Gather<512, 656, 4>",  # fp8 rows
    "Gather<512, 1152, 4>",  # bf16 rows
    "Store<512, 656, 4>",
    "Store<512, 1152, 4>",
)


# Calls the wrappers as Python does, with tensors that claim to be on a GPU. A swap of no rows returns before its launch; a
# gather and a store come as far as the launch, which says that there is no GPU.
CALL = """
#include "nsa_kv_offload/launch.cuh"
#include <iostream>
#include <vector>

struct Tensor {
  std::vector<int64_t> shape, strides;
  DLTensor view;
  Tensor(std::vector<int64_t> sizes, uint8_t code, uint8_t bits, DLDeviceType type = kDLCUDA)
      : shape(sizes), strides(sizes.size(), 1) {
    for (int i = static_cast<int>(sizes.size()) - 2; i >= 0; --i) strides[i] = strides[i + 1] * shape[i + 1];
    view = {reinterpret_cast<void*>(4096), {type, 0}, static_cast<int>(sizes.size()), {code, bits, 1},
            shape.data(), strides.data(), 0};
  }
  operator tvm::ffi::TensorView() { return tvm::ffi::TensorView(&view); }
};

int main() {
  Tensor topk({0, 2048}, kDLInt, 32), none({0}, kDLInt, 32), lengths({0}, kDLInt, 32), windows({9}, kDLInt, 32);
  Tensor rows({40, 33000}, kDLInt, 32), positions({9, 4096}, kDLInt, 32);
  Tensor stamps({9, 4096}, kDLInt, 16), counters({3}, kDLInt, 64), list({18 * 2048}, kDLInt, 32);
  Tensor wanted({313}, kDLInt, 32), target({10000}, kDLInt, 32), state({4}, kDLInt, 32);
  nsa_kv_offload::Swap<1024, 2, 32768>::run(
      topk, none, none, lengths, windows, rows, positions, stamps, counters, topk, list, list, wanted, target, state,
      2048, 64, 64, 4160);
  // Windows that the kernel cannot read: no whole words of marks, more than shared memory has beside so many entries, tables askew.
  Tensor odd({9, 4094}, kDLInt, 32), odd_stamps({9, 4094}, kDLInt, 16), many({0, 20480}, kDLInt, 32);
  Tensor large({9, 24576}, kDLInt, 32), large_stamps({9, 24576}, kDLInt, 16), askew({9, 4096}, kDLInt, 32);
  askew.view.data = reinterpret_cast<void*>(4100);
  const auto refuse = [&](Tensor& entries, Tensor& held, Tensor& used) {
    try {
      nsa_kv_offload::Swap<1024, 2, 32768>::run(
          entries, none, none, lengths, windows, rows, held, used, counters, entries, list, list, wanted, target,
          state, 2048, 64, 64, 4160);
      std::cout << "not refused" << std::endl;
    } catch (const std::exception& error) {
      std::cout << "refused: " << error.what() << std::endl;
    }
  };
  refuse(topk, odd, odd_stamps);
  refuse(many, large, large_stamps);
  refuse(topk, askew, stamps);
  Tensor host({10000, 656}, kDLUInt, 8, kDLCPU), device({40000, 656}, kDLUInt, 8);
  try {
    nsa_kv_offload::Gather<512, 656, 4>::run(host, device, list, list, wanted, target, state, 1024, 32);
  } catch (const std::exception& error) {
    std::cout << error.what() << std::endl;
  }
  Tensor layers({61}, kDLUInt, 64), slots({128}, kDLInt, 64), no_slots({0}, kDLInt, 64);
  nsa_kv_offload::Store<512, 656, 4>::run(layers, layers, no_slots, no_slots, 8);
  try {
    nsa_kv_offload::Store<512, 656, 4>::run(layers, layers, slots, slots, 8);
  } catch (const std::exception& error) {
    std::cout << error.what() << std::endl;
  }
}
"""


def nvcc(source, *more):
    import tvm_ffi

    kernels, ffi = SGLANG / "jit_kernel", Path(tvm_ffi.__file__).parent
    includes = [kernels / "csrc", kernels / "include", ffi / "include"]
    command = ["nvcc", "-std=c++20", "-O3", "--expt-relaxed-constexpr", "-gencode=arch=compute_90,code=sm_90"]
    command += ["-DSGL_CUDA_ARCH=900", *(f"-I{path}" for path in includes), str(source), *more]
    run = subprocess.run(command, capture_output=True, text=True)
    assert run.returncode == 0, run.stderr
    return run.stderr


@pytest.mark.skipif(shutil.which("nvcc") is None, reason="needs nvcc")
def test_wrappers_accept_what_a_server_passes(tmp_path):
    import tvm_ffi

    source, program = tmp_path / "call.cu", tmp_path / "call"
    source.write_text(CALL)
    library = Path(tvm_ffi.__file__).parent / "lib"
    nvcc(source, "-o", str(program), f"-L{library}", "-ltvm_ffi", f"-Xlinker=-rpath={library}")
    run = subprocess.run([str(program)], capture_output=True, text=True)
    assert run.returncode == 0, run.stderr
    for words in ("4094 LRU slots are no multiple of 4", "24576 LRU slots exceed shared memory", "not aligned to vector loads"):
        assert words in run.stdout
    assert run.stdout.count("refused: ") == 3 and run.stdout.count("CUDA error") == 2, run.stdout


@pytest.mark.skipif(shutil.which("nvcc") is None, reason="needs nvcc")
def test_swap_kernels_compile_without_spills(tmp_path):
    source = tmp_path / "instances.cu"
    lines = ['#include "nsa_kv_offload/launch.cuh"']
    lines += [f"template struct nsa_kv_offload::{name};" for name in INSTANCES]
    source.write_text("\n".join(lines))
    said = nvcc(source, "-Xptxas", "-v", "-c", "-o", str(tmp_path / "out.o"))
    assert "warning" not in said
    stacks = re.findall(r"(\d+) bytes stack frame, (\d+) bytes spill stores", said)
    assert len(stacks) == len(INSTANCES)
    assert all(pair == ("0", "0") for pair in stacks), said
