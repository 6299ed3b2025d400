/// Copies the rows of a miss queue from the host pool into the windows, and empties the queue.
///
/// Scattered rows of a large pool miss address translations; in host-address order the rows in flight share them.
#pragma once

#include "miss_queue.cuh"

namespace nsa_kv_offload {

constexpr int kPieceSlots = 1024;  // host slots that a warp looks at together: one word of `wanted` a lane

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

/// Number of this warp among all; neighbours lie in different blocks, so that little work still uses every one.
__device__ __forceinline__ int warp_number() { return threadIdx.x / 32 * gridDim.x + blockIdx.x; }

/// The listed rows, in the list's order, shared out evenly among all warps.
template <int kRowBytes, int kRows>
__device__ void gather_listed(const GatherParams& params, int listed) {
  const int warps = gridDim.x * blockDim.x / 32;
  const int even = (listed + warps - 1) / warps;
  const int share = even < kRows ? even : kRows;
  for (int first = warp_number() * share; first < listed; first += warps * share) {
    const int count = listed - first < share ? listed - first : share;
    int host_slots[kRows], device_slots[kRows];
#pragma unroll
    for (int i = 0; i < kRows; ++i) {
      host_slots[i] = i < count ? params.queue.host_slots[first + i] : 0;
      device_slots[i] = i < count ? params.queue.device_slots[first + i] : 0;
    }
    copy_rows<kRowBytes, kRows>(params, host_slots, device_slots, count);
  }
}

/// The wanted rows in address order: all warps walk through the pieces side by side, so that at any time they
/// read from one small stretch of the pool. Clears the bits it takes.
template <int kRowBytes, int kRows>
__device__ void gather_wanted(const GatherParams& params) {
  const int lane = threadIdx.x % 32;
  const int warps = gridDim.x * blockDim.x / 32;
  const int words = (params.num_host_rows + 31) / 32;
  const int pieces = (params.num_host_rows + kPieceSlots - 1) / kPieceSlots;
  const auto word_of = [&](int piece) {
    const int index = piece * 32 + lane;
    return piece < pieces && index < words ? params.queue.wanted[index] : 0u;
  };

  // Rows wait until kRows of them can be in flight together, also where a piece has few: lane i holds the i-th.
  int waiting = 0, waiting_slot = 0;
  const auto copy_waiting = [&] {
    const int target = lane < waiting ? params.queue.target[waiting_slot] : 0;
    int host_slots[kRows], device_slots[kRows];
#pragma unroll
    for (int i = 0; i < kRows; ++i) {
      host_slots[i] = __shfl_sync(0xffffffffu, waiting_slot, i);
      device_slots[i] = __shfl_sync(0xffffffffu, target, i);
    }
    copy_rows<kRowBytes, kRows>(params, host_slots, device_slots, waiting);
    waiting = 0;
  };

  uint32_t next = word_of(warp_number());
  for (int piece = warp_number(); piece < pieces; piece += warps) {
    uint32_t word = next;
    next = word_of(piece + warps);  // arrives while this piece is copied
    if (word != 0) params.queue.wanted[piece * 32 + lane] = 0;
    for (unsigned lanes = __ballot_sync(0xffffffffu, word != 0); lanes != 0;
         lanes = __ballot_sync(0xffffffffu, word != 0)) {
      const int owner = __ffs(lanes) - 1;
      const int bit = __ffs(__shfl_sync(0xffffffffu, word, owner)) - 1;
      if (lane == owner) word &= word - 1;
      if (lane == waiting) waiting_slot = (piece * 32 + owner) * 32 + bit;
      if (++waiting == kRows) copy_waiting();
    }
  }
  if (waiting > 0) copy_waiting();
}

template <int kThreads, int kRowBytes, int kRows>
__global__ void __launch_bounds__(kThreads) gather_kernel(const GatherParams params) {
  const MissQueue& queue = params.queue;
  const int misses = queue.state[kMisses];
  if (misses == 0) return;  // for every block alike: the state changes only once all of them have read it
  const int listed = queue.wanted != nullptr ? queue.state[kListed] : misses;
  if (queue.wanted != nullptr) gather_wanted<kRowBytes, kRows>(params);
  gather_listed<kRowBytes, kRows>(params, listed);

  __syncthreads();  // every thread of this block has read the state
  if (threadIdx.x != 0) return;
  if (atomicAdd(&queue.state[kLeaving], 1) == static_cast<int>(gridDim.x) - 1) {
    for (int i = 0; i < kNumStates; ++i) queue.state[i] = 0;
  }
}

}  // namespace nsa_kv_offload
