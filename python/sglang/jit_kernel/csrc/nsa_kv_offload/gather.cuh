/// Copies the rows of a miss queue from the host pool into the windows, and empties the queue.
///
/// Scattered rows of a large pool miss address translations, most in pinned memory; rows in flight that lie close
/// together share them. So rows go in address order, unless they are so few that to find the order costs more.
#pragma once

#include <sgl_kernel/utils.cuh>

#include "miss_queue.cuh"
#include "scan.cuh"

namespace nsa_kv_offload {

constexpr int kListRows = 1024;  // rows of a chunk that a block lists at a time
constexpr int kLineBytes = 128;

struct GatherParams {
  const uint8_t* host_rows;  // [num_host_rows, row bytes] pinned or managed
  uint8_t* device_rows;      // [*, row bytes]
  MissQueue queue;
  int num_host_rows;
  int order_min_rows;
};

/// Shared memory of a block. Two of what a fast warp writes for its next chunk while slow ones still read.
struct GatherShared {
  int host_slots[kListRows];
  int scan_sums[2][kMaxWarps];
  int next_chunk[2];
};

/// Copy up to kRows rows, all loads before the first store. `count` is the same for the whole warp.
///
/// A warp's loads begin at line boundaries, so that no two of them ask for parts of one line of a row. Where a row goes
/// is looked up meanwhile.
template <int kRowBytes, int kRows, typename TargetOf>
__device__ __forceinline__ void
copy_rows(const GatherParams& params, const int* host_slots, int count, const TargetOf& target_of) {
  constexpr int kUnits = kRowBytes / sizeof(uint4), kLineUnits = kLineBytes / sizeof(uint4);
  constexpr int kSteps = (kLineUnits - 1 + kUnits + kWarpSize - 1) / kWarpSize;
  static_assert(kRowBytes % sizeof(uint4) == 0);
  uint4 units[kRows][kSteps];
  int first_units[kRows], targets[kRows];
#pragma unroll
  for (int i = 0; i < kRows; ++i) {
    const uint8_t* row = params.host_rows + static_cast<int64_t>(i < count ? host_slots[i] : 0) * kRowBytes;
    first_units[i] = static_cast<int>(threadIdx.x % kWarpSize) -
                     static_cast<int>(reinterpret_cast<uintptr_t>(row) % kLineBytes / sizeof(uint4));
#pragma unroll
    for (int step = 0; step < kSteps; ++step) {
      const int unit = first_units[i] + step * kWarpSize;
      if (i < count && unit >= 0 && unit < kUnits) units[i][step] = __ldcs(reinterpret_cast<const uint4*>(row) + unit);
    }
  }
#pragma unroll
  for (int i = 0; i < kRows; ++i) targets[i] = i < count ? target_of(i) : 0;
#pragma unroll
  for (int i = 0; i < kRows; ++i) {
    auto* row = reinterpret_cast<uint4*>(params.device_rows + static_cast<int64_t>(targets[i]) * kRowBytes);
#pragma unroll
    for (int step = 0; step < kSteps; ++step) {
      const int unit = first_units[i] + step * kWarpSize;
      if (i < count && unit >= 0 && unit < kUnits) row[unit] = units[i][step];
    }
  }
}

/// Share out a list among warps in its order, evenly where it is short. Row i goes to `target_of(i)`.
template <int kRowBytes, int kRows, typename TargetOf>
__device__ __forceinline__ void copy_list(
    const GatherParams& params,
    const int* host_slots,
    int num_rows,
    int warp,
    int num_warps,
    const TargetOf& target_of) {
  const int even = (num_rows + num_warps - 1) / num_warps;
  const int share = even < kRows ? even : kRows;
  for (int first = warp * share; first < num_rows; first += num_warps * share) {
    const int count = num_rows - first < share ? num_rows - first : share;
    copy_rows<kRowBytes, kRows>(params, host_slots + first, count, [&](int i) { return target_of(first + i); });
  }
}

/// The wanted rows: blocks take chunks of the bitmap in turn, in address order, and the warps of a block share each
/// chunk's rows, so that all rows in flight come from a few neighbouring chunks. Clears the bits it takes.
template <int kThreads, int kRowBytes, int kRows>
__device__ void gather_wanted(const GatherParams& params, GatherShared& shared) {
  const MissQueue& queue = params.queue;
  const int thread = threadIdx.x;
  const int words = (params.num_host_rows + 31) / 32, chunks = (words + kThreads - 1) / kThreads;
  const auto word_of = [&](int chunk) {
    const int index = chunk * kThreads + thread;
    return chunk < chunks && index < words ? queue.wanted[index] : 0u;
  };
  const auto take_chunk = [&] { return static_cast<int>(gridDim.x) + atomicAdd(&queue.state[kChunks], 1); };

  int chunk = blockIdx.x;
  uint32_t next_word = word_of(chunk);
  if (thread == 0) shared.next_chunk[0] = take_chunk();
  for (int turn = 0; chunk < chunks; turn ^= 1) {
    const uint32_t word = next_word;
    const int first_slot = (chunk * kThreads + thread) * 32;
    if (word != 0) queue.wanted[first_slot / 32] = 0;
    const ScanResult rows = scan_block<kThreads>(__popc(word), shared.scan_sums[turn]);
    chunk = shared.next_chunk[turn];
    // Both arrive while this chunk's rows are copied.
    next_word = word_of(chunk);
    const int next_chunk = thread == 0 ? take_chunk() : 0;
    for (int begin = 0; begin < rows.total; begin += kListRows) {
      if (begin > 0) __syncthreads();  // the rows listed before have been read
      int rank = rows.before - begin;
      for (uint32_t rest = word; rest != 0; rest &= rest - 1, ++rank) {
        if (rank < 0 || rank >= kListRows) continue;
        shared.host_slots[rank] = first_slot + __ffs(rest) - 1;
      }
      __syncthreads();
      const int listed = rows.total - begin < kListRows ? rows.total - begin : kListRows;
      copy_list<kRowBytes, kRows>(
          params, shared.host_slots, listed, thread / kWarpSize, kThreads / kWarpSize, [&](int i) {
            return queue.target[shared.host_slots[i]];
          });
    }
    if (thread == 0) shared.next_chunk[turn ^ 1] = next_chunk;
  }
}

template <int kThreads, int kRowBytes, int kRows>
__global__ void __launch_bounds__(kThreads, 1) gather_kernel(const GatherParams params) {
  extern __shared__ uint32_t shared_memory[];
  static_assert(kThreads % kWarpSize == 0 && kThreads <= kMaxWarps * kWarpSize);
  const MissQueue& queue = params.queue;
  device::PDLWaitPrimary<true>();
  const int misses = queue.state[kMisses];
  if (misses == 0) return;  // for every block alike: the state changes only once all of them have read it
  const int thread = blockIdx.x * kThreads + threadIdx.x, num_threads = gridDim.x * kThreads;
  const int num_warps = num_threads / kWarpSize;
  if (misses < params.order_min_rows) {
    // Threads that have no row to copy come first.
    for (int i = num_threads - 1 - thread; i < misses; i += num_threads) {
      queue.wanted[queue.host_slots[i] / 32] = 0;
    }
    // Neighbours of a short list go to different blocks, so that it uses every one.
    const bool is_short = misses <= num_warps;
    const int warp = is_short ? threadIdx.x / kWarpSize * gridDim.x + blockIdx.x : thread / kWarpSize;
    copy_list<kRowBytes, kRows>(
        params, queue.host_slots, misses, warp, num_warps, [&](int i) { return queue.device_slots[i]; });
  } else {
    gather_wanted<kThreads, kRowBytes, kRows>(params, *reinterpret_cast<GatherShared*>(shared_memory));
    const int* again = queue.host_slots + queue.capacity;
    copy_list<kRowBytes, kRows>(params, again, queue.state[kAgain], thread / kWarpSize, num_warps, [&](int i) {
      return queue.device_slots[queue.capacity + i];
    });
  }

  __syncthreads();  // every thread of this block has read the state
  if (threadIdx.x != 0) return;
  if (atomicAdd(&queue.state[kLeaving], 1) == static_cast<int>(gridDim.x) - 1) {
    for (int i = 0; i < kNumStates; ++i) queue.state[i] = 0;
  }
}

}  // namespace nsa_kv_offload
