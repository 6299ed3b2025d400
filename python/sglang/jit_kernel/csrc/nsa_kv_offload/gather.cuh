/// Copies the rows of a miss queue from the host pool into the windows, and empties the queue.
///
/// Rows in host-address order cross the link faster than scattered ones, which miss address translations:
/// 40 against 26 GB/s on first touch for 656-byte rows on an H200.
#pragma once

#include "miss_queue.cuh"

namespace nsa_kv_offload {

constexpr int kPieceSlots = 1024;  // host slots that a warp takes at a time: one word of `wanted` a lane

struct GatherParams {
  const uint8_t* host_rows;  // [num_host_rows, row bytes] pinned
  uint8_t* device_rows;      // [*, row bytes]
  MissQueue queue;
  int num_host_rows;
};

/// Copy up to kRows rows, all loads before the first store. `count` is the same for the whole warp.
template <int kRowBytes, int kRows>
__device__ __forceinline__ void
copy_rows(const GatherParams& params, const int (&host_slots)[kRows], const int (&device_slots)[kRows], int count) {
  constexpr int kUnits = kRowBytes / sizeof(uint4), kSteps = (kUnits + 31) / 32;
  static_assert(kRowBytes % sizeof(uint4) == 0);
  const int lane = threadIdx.x % 32;
  uint4 units[kSteps][kRows];
#pragma unroll
  for (int step = 0; step < kSteps; ++step) {
#pragma unroll
    for (int i = 0; i < kRows; ++i) {
      const int unit = lane + step * 32;
      if (i < count && unit < kUnits) {
        const int64_t start = static_cast<int64_t>(host_slots[i]) * kRowBytes;
        units[step][i] = __ldcs(reinterpret_cast<const uint4*>(params.host_rows + start) + unit);
      }
    }
  }
#pragma unroll
  for (int step = 0; step < kSteps; ++step) {
#pragma unroll
    for (int i = 0; i < kRows; ++i) {
      const int unit = lane + step * 32;
      if (i < count && unit < kUnits) {
        const int64_t start = static_cast<int64_t>(device_slots[i]) * kRowBytes;
        reinterpret_cast<uint4*>(params.device_rows + start)[unit] = units[step][i];
      }
    }
  }
}

/// The listed rows, in the list's order, shared out among all warps.
template <int kRowBytes, int kRows>
__device__ void gather_listed(const GatherParams& params, int listed) {
  const int warps = gridDim.x * blockDim.x / 32;
  const int warp = (blockIdx.x * blockDim.x + threadIdx.x) / 32;
  for (int first = warp * kRows; first < listed; first += warps * kRows) {
    const int count = listed - first < kRows ? listed - first : kRows;
    int host_slots[kRows], device_slots[kRows];
#pragma unroll
    for (int i = 0; i < kRows; ++i) {
      host_slots[i] = i < count ? params.queue.host_slots[first + i] : 0;
      device_slots[i] = i < count ? params.queue.device_slots[first + i] : 0;
    }
    copy_rows<kRowBytes, kRows>(params, host_slots, device_slots, count);
  }
}

/// The wanted rows in address order: warps take pieces by ticket, so that at any time all of them read
/// from one small stretch of the pool. Clears the bits it takes.
template <int kRowBytes, int kRows>
__device__ void gather_wanted(const GatherParams& params) {
  const int lane = threadIdx.x % 32;
  const int words = (params.num_host_rows + 31) / 32;
  const int pieces = (params.num_host_rows + kPieceSlots - 1) / kPieceSlots;
  const auto draw = [&] { return lane == 0 ? atomicAdd(&params.queue.state[kTicket], 1) : 0; };

  int ticket = draw();
  for (int piece = __shfl_sync(0xffffffffu, ticket, 0); piece < pieces; piece = __shfl_sync(0xffffffffu, ticket, 0)) {
    ticket = draw();  // its latency passes while the piece is copied
    const int word_index = piece * 32 + lane;
    uint32_t word = word_index < words ? params.queue.wanted[word_index] : 0;
    if (word != 0) params.queue.wanted[word_index] = 0;
    unsigned lanes = __ballot_sync(0xffffffffu, word != 0);
    while (lanes != 0) {
      int host_slots[kRows], device_slots[kRows], count = 0;
#pragma unroll
      for (int i = 0; i < kRows; ++i) {
        host_slots[i] = device_slots[i] = 0;
        if (lanes == 0) continue;
        const int owner = __ffs(lanes) - 1;
        const int bit = __ffs(__shfl_sync(0xffffffffu, word, owner)) - 1;
        if (lane == owner) word &= word - 1;
        host_slots[i] = (piece * 32 + owner) * 32 + bit;
        device_slots[i] = params.queue.target[host_slots[i]];
        lanes = __ballot_sync(0xffffffffu, word != 0);
        ++count;
      }
      copy_rows<kRowBytes, kRows>(params, host_slots, device_slots, count);
    }
  }
}

template <int kThreads, int kRowBytes, int kRows>
__global__ void __launch_bounds__(kThreads) gather_kernel(const GatherParams params) {
  const MissQueue& queue = params.queue;
  const int misses = queue.state[kMisses];
  if (misses == 0) return;  // for every block alike: the state changes only once all of them have read it
  const int listed = queue.wanted != nullptr ? queue.state[kListed] : misses;
  if (queue.wanted != nullptr) gather_wanted<kRowBytes, kRows>(params);
  gather_listed<kRowBytes, kRows>(params, listed);

  __syncthreads();
  if (threadIdx.x != 0) return;
  __threadfence();  // this block's tickets are drawn before the last block to leave clears them
  if (atomicAdd(&queue.state[kLeaving], 1) == static_cast<int>(gridDim.x) - 1) {
    for (int i = 0; i < kNumStates; ++i) queue.state[i] = 0;
  }
}

}  // namespace nsa_kv_offload
