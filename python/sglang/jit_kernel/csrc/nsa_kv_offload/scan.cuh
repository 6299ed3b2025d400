/// Sums over a thread block.
#pragma once

namespace nsa_kv_offload {

constexpr unsigned kFullWarp = 0xffffffffu;
constexpr int kWarpSize = 32;
constexpr int kMaxWarps = 32;

struct ScanResult {
  int before;
  int total;
};

/// Exclusive sum over the block, in thread order. Ends behind a barrier; `sums` [kMaxWarps] serves one scan.
template <int kThreads>
__device__ __forceinline__ ScanResult scan_block(int value, int* sums) {
  const int lane = threadIdx.x % kWarpSize, warp = threadIdx.x / kWarpSize;
  int upto = value;
  for (int step = 1; step < kWarpSize; step *= 2) {
    const int other = __shfl_up_sync(kFullWarp, upto, step);
    upto += lane >= step ? other : 0;
  }
  if (lane == kWarpSize - 1) sums[warp] = upto;
  __syncthreads();
  const int of_warp = lane < kThreads / kWarpSize ? sums[lane] : 0;
  const int earlier = __reduce_add_sync(kFullWarp, lane < warp ? of_warp : 0);
  return {earlier + upto - value, __reduce_add_sync(kFullWarp, of_warp)};
}

/// Sum over the block, for every thread. Ends behind a barrier; `sums` [kMaxWarps] serves one sum.
template <int kThreads>
__device__ __forceinline__ int sum_block(int value, int* sums) {
  const int lane = threadIdx.x % kWarpSize;
  const int of_own_warp = __reduce_add_sync(kFullWarp, value);
  if (lane == 0) sums[threadIdx.x / kWarpSize] = of_own_warp;
  __syncthreads();
  return __reduce_add_sync(kFullWarp, lane < kThreads / kWarpSize ? sums[lane] : 0);
}

}  // namespace nsa_kv_offload
