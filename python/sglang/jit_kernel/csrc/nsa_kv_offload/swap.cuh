/// One layer's swap of a decode step: which rows of the top-k are in the request's window, which device
/// slots the others get, and what to load. One block a batch row; nothing is copied here.
///
/// Words: *position* in a sequence; *host slot*, row of the host pool; *window offset*, slot in a request's
/// window; *device slot*, row of the device buffer.
#pragma once

#include "miss_queue.cuh"

namespace nsa_kv_offload {

constexpr unsigned kFullWarp = 0xffffffffu;
constexpr int kWarpSize = 32;
constexpr int kMaxWarps = 32;
constexpr int16_t kAbsent = -1;   // the position is in no window offset
constexpr int16_t kClaimed = -2;  // and below: absent, and entry (kClaimed - value) of this top-k loads it
constexpr int kAgeBuckets = 128;
constexpr int kTouched = kAgeBuckets;  // mark of a slot that this step's top-k uses; 0 otherwise

template <typename SeqLen>
struct SwapParams {
  const int32_t* topk;           // [batch, k] positions, -1 for none
  const int32_t* batch_windows;  // [batch] -1 for padding
  const int32_t* batch_rows;     // [batch] request rows
  const SeqLen* seq_lens;        // [batch] with this step's token
  const int32_t* ring_begin;     // [windows] first position that decoding wrote to the ring
  const int32_t* req_to_token;   // [rows, row_stride] host slots
  int16_t* offset_of_position;   // [windows, context]
  int32_t* position_at_offset;   // [windows, lru_slots]
  uint16_t* last_used;           // [windows, lru_slots] low bits of the sequence length
  unsigned long long* counters;  // [3] hits, ring hits, misses
  int32_t* page_table;           // [batch, k] out: device slots
  MissQueue queue;
  int64_t row_stride;
  int64_t context;
  int k;
  int lru_slots;
  int ring_slots;
  int first_window_slot;
  int window_slots;
};

/// Shared memory of a block; behind it lie `victims` [k] and `marks` [lru_slots].
struct SwapShared {
  int scan_sums[2][kMaxWarps];
  unsigned tallies[kMaxWarps];
  int queued_before;
  int age_histogram[kAgeBuckets];
};

struct ScanResult {
  int before;
  int total;
};

/// Exclusive sum over the block, in thread order. Ends behind a barrier; `sums` serves one scan.
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
  int warps = lane < kThreads / kWarpSize ? sums[lane] : 0;
  for (int step = 1; step < kWarpSize; step *= 2) {
    const int other = __shfl_up_sync(kFullWarp, warps, step);
    warps += lane >= step ? other : 0;
  }
  const int total = __shfl_sync(kFullWarp, warps, kWarpSize - 1);
  const int earlier = __shfl_sync(kFullWarp, warps, warp > 0 ? warp - 1 : 0);
  return {(warp > 0 ? earlier : 0) + upto - value, total};
}

/// Ages below 16 have a bucket each, older ones eight for each power of two.
__device__ __forceinline__ int age_bucket(uint16_t age) {
  if (age < 16) return age;
  const int exponent = 31 - __clz(static_cast<int>(age));
  return 16 + (exponent - 4) * 8 + ((age >> (exponent - 3)) & 7);
}

/// Write the offsets of the `need` least recently used, untouched slots to `victims`: first those older
/// than a boundary bucket, then from the boundary, each in the order of the offsets. Consumes the marks.
///
/// At least `need` slots are untouched, since a top-k has no more entries than a window has slots.
template <int kThreads>
__device__ void pick_victims(
    const uint16_t* last_used,
    uint16_t now,
    int lru_slots,
    int need,
    uint8_t* marks,
    uint16_t* victims,
    SwapShared& shared) {
  const int lane = threadIdx.x % kWarpSize;
  const int per_thread = (lru_slots + kThreads - 1) / kThreads;
  const int first = threadIdx.x * per_thread;
  const int num_own = first < lru_slots ? (lru_slots - first < per_thread ? lru_slots - first : per_thread) : 0;

  // From here on a slot's mark is its bucket. Each thread reads and writes those of its own slots.
  constexpr int kAtOnce = 4;
  for (int begin = 0; begin < per_thread; begin += kAtOnce) {
    uint16_t stamps[kAtOnce];
#pragma unroll
    for (int i = 0; i < kAtOnce; ++i) stamps[i] = begin + i < num_own ? last_used[first + begin + i] : 0;
#pragma unroll
    for (int i = 0; i < kAtOnce; ++i) {
      const int slot = first + begin + i;
      int bucket = kTouched;
      if (begin + i < num_own) {
        // A stamp may have wrapped to the age of a touched slot; only the mark decides who may be evicted.
        if (!marks[slot]) bucket = age_bucket(static_cast<uint16_t>(now - stamps[i]));
        marks[slot] = bucket;
      }
      const unsigned peers = __match_any_sync(kFullWarp, bucket);
      if (bucket != kTouched && lane == __ffs(peers) - 1) {
        atomicAdd(&shared.age_histogram[bucket], __popc(peers));
      }
    }
  }
  __syncthreads();

  // Every warp finds the boundary for itself; lane 0 has the oldest buckets.
  constexpr int kPerLane = kAgeBuckets / kWarpSize;
  int own = 0;
  for (int i = 0; i < kPerLane; ++i) own += shared.age_histogram[kAgeBuckets - 1 - (lane * kPerLane + i)];
  int upto = own;
  for (int step = 1; step < kWarpSize; step *= 2) {
    const int other = __shfl_up_sync(kFullWarp, upto, step);
    upto += lane >= step ? other : 0;
  }
  int older = upto - own, boundary = kAgeBuckets - 1 - lane * kPerLane;
  const bool here = older < need && need <= upto;
  if (here) {
    while (older + shared.age_histogram[boundary] < need) older += shared.age_histogram[boundary--];
  }
  const int source = __ffs(__ballot_sync(kFullWarp, here)) - 1;
  older = __shfl_sync(kFullWarp, older, source);
  boundary = __shfl_sync(kFullWarp, boundary, source);

  int num_older = 0, num_boundary = 0;
  for (int i = 0; i < num_own; ++i) {
    const int bucket = marks[first + i];
    num_older += bucket != kTouched && bucket > boundary;
    num_boundary += bucket == boundary;
  }
  // Both counts fit 16 bits: a window has at most 2^15 slots.
  const int before = scan_block<kThreads>(num_older | num_boundary << 16, shared.scan_sums[1]).before;
  int older_rank = before & 0xffff, boundary_rank = older + (before >> 16);
  for (int i = 0; i < num_own; ++i) {
    const int bucket = marks[first + i];
    if (bucket != kTouched && bucket > boundary) victims[older_rank++] = first + i;
    if (bucket == boundary && boundary_rank < need) victims[boundary_rank++] = first + i;
  }
}

/// Entries of a thread are neighbours in the top-k, so that a thread-order scan ranks misses in top-k order.
template <int kThreads, int kEntries, typename SeqLen>
__global__ void __launch_bounds__(kThreads) swap_kernel(const SwapParams<SeqLen> params) {
  extern __shared__ uint32_t shared_memory[];
  SwapShared& shared = *reinterpret_cast<SwapShared*>(shared_memory);
  uint16_t* victims = reinterpret_cast<uint16_t*>(&shared + 1);
  uint8_t* marks = reinterpret_cast<uint8_t*>(victims + (params.k + 1) / 2 * 2);
  static_assert(kThreads % kWarpSize == 0 && kThreads <= kMaxWarps * kWarpSize && kEntries <= 32);

  const int thread = threadIdx.x, lane = thread % kWarpSize, warp = thread / kWarpSize;
  const int64_t row = blockIdx.x;
  const int32_t* topk = params.topk + row * params.k;
  int32_t* page_table = params.page_table + row * params.k;
  const int first_entry = thread * kEntries;
  int positions[kEntries];
#pragma unroll
  for (int e = 0; e < kEntries; ++e) positions[e] = first_entry + e < params.k ? topk[first_entry + e] : -1;

  const int64_t window = params.batch_windows[row];
  if (window < 0) {
    // A padded row reads the dummy slot 0, as in the base, and owns nothing.
#pragma unroll
    for (int e = 0; e < kEntries; ++e) {
      if (first_entry + e < params.k) page_table[first_entry + e] = positions[e] < 0 ? -1 : 0;
    }
    return;
  }
  const int window_slot = params.first_window_slot + static_cast<int>(window) * params.window_slots;
  int16_t* offset_of = params.offset_of_position + window * params.context;
  int32_t* position_at = params.position_at_offset + window * params.lru_slots;
  uint16_t* last_used = params.last_used + window * params.lru_slots;
  const int seq_len = static_cast<int>(params.seq_lens[row]);
  const uint16_t now = static_cast<uint16_t>(seq_len);
  // Newer positions are in the ring, whatever they are: nothing past the sequence reads a table.
  const int ring_begin = params.ring_begin[window];
  const int first_in_ring = ring_begin > seq_len - params.ring_slots ? ring_begin : seq_len - params.ring_slots;

  int offsets[kEntries];
#pragma unroll
  for (int e = 0; e < kEntries; ++e) {
    const bool in_lru = positions[e] >= 0 && positions[e] < first_in_ring;
    offsets[e] = in_lru ? offset_of[positions[e]] : kAbsent;
  }
  for (int i = thread; i < kAgeBuckets; i += kThreads) shared.age_histogram[i] = 0;
  for (int i = thread; i < (params.lru_slots + 3) / 4; i += kThreads) reinterpret_cast<uint32_t*>(marks)[i] = 0;
  // Of entries with the same position the one whose claim stays loads the row; the others read its offset below.
#pragma unroll
  for (int e = 0; e < kEntries; ++e) {
    const bool absent = positions[e] >= 0 && positions[e] < first_in_ring && offsets[e] < 0;
    if (absent) offset_of[positions[e]] = static_cast<int16_t>(kClaimed - (first_entry + e));
  }
  __syncthreads();

  unsigned missed = 0, duplicate = 0, num_hits = 0, num_in_ring = 0;
#pragma unroll
  for (int e = 0; e < kEntries; ++e) {
    if (first_entry + e >= params.k) continue;
    int slot = -1;
    if (positions[e] >= first_in_ring) {
      slot = window_slot + params.lru_slots + positions[e] % params.ring_slots;
      ++num_in_ring;
    } else if (offsets[e] >= 0) {
      slot = window_slot + offsets[e];
      marks[offsets[e]] = kTouched;
      last_used[offsets[e]] = now;
      ++num_hits;
    } else if (positions[e] >= 0) {
      const bool claims = offset_of[positions[e]] == kClaimed - (first_entry + e);
      missed |= static_cast<unsigned>(claims) << e;
      duplicate |= static_cast<unsigned>(!claims) << e;
    }
    page_table[first_entry + e] = slot;
  }
  const unsigned tally = __reduce_add_sync(kFullWarp, num_hits | num_in_ring << 16);
  if (lane == 0) shared.tallies[warp] = tally;
  const ScanResult misses = scan_block<kThreads>(__popc(missed), shared.scan_sums[0]);

  int queued_before = 0;
  if (warp == 0) {
    const unsigned sum = __reduce_add_sync(kFullWarp, lane < kThreads / kWarpSize ? shared.tallies[lane] : 0u);
    if (lane == 0) {
      atomicAdd(&params.counters[0], static_cast<unsigned long long>(sum & 0xffffu));
      atomicAdd(&params.counters[1], static_cast<unsigned long long>(sum >> 16));
      if (misses.total > 0) {
        atomicAdd(&params.counters[2], static_cast<unsigned long long>(misses.total));
        queued_before = atomicAdd(&params.queue.state[kMisses], misses.total);
      }
    }
  }
  if (misses.total == 0) return;

  pick_victims<kThreads>(last_used, now, params.lru_slots, misses.total, marks, victims, shared);
  if (thread == 0) shared.queued_before = queued_before;  // late, so that the latency of the atomic passes above
  __syncthreads();

  const int first_index = shared.queued_before + misses.before;
  const int32_t* host_slot_of = params.req_to_token + params.batch_rows[row] * params.row_stride;
  int evicted[kEntries], host_slots[kEntries], rank = misses.before;
#pragma unroll
  for (int e = 0; e < kEntries; ++e) {
    if (!(missed >> e & 1)) continue;
    offsets[e] = victims[rank++];
    evicted[e] = position_at[offsets[e]];
    host_slots[e] = host_slot_of[positions[e]];
  }
  const MissQueue& queue = params.queue;
  unsigned listed = missed;
  if (queue.wanted != nullptr) {
    // A host slot wanted before, by a request with the same prefix, goes to the list.
    uint32_t before[kEntries];
#pragma unroll
    for (int e = 0; e < kEntries; ++e) {
      if (missed >> e & 1) before[e] = atomicOr(&queue.wanted[host_slots[e] / 32], 1u << (host_slots[e] % 32));
    }
#pragma unroll
    for (int e = 0; e < kEntries; ++e) {
      if (!(missed >> e & 1) || (before[e] >> (host_slots[e] % 32) & 1)) continue;
      queue.target[host_slots[e]] = window_slot + offsets[e];
      listed &= ~(1u << e);
    }
  }
  rank = 0;
#pragma unroll
  for (int e = 0; e < kEntries; ++e) {
    if (!(missed >> e & 1)) continue;
    if (evicted[e] >= 0) offset_of[evicted[e]] = kAbsent;
    offset_of[positions[e]] = static_cast<int16_t>(offsets[e]);
    position_at[offsets[e]] = positions[e];
    last_used[offsets[e]] = now;
    page_table[first_entry + e] = window_slot + offsets[e];
    if (listed >> e & 1) {
      const int index = queue.wanted != nullptr ? atomicAdd(&queue.state[kListed], 1) : first_index + rank++;
      queue.host_slots[index] = host_slots[e];
      queue.device_slots[index] = window_slot + offsets[e];
    }
  }
  if (!__syncthreads_or(duplicate != 0)) return;
#pragma unroll
  for (int e = 0; e < kEntries; ++e) {
    if (duplicate >> e & 1) page_table[first_entry + e] = window_slot + offset_of[positions[e]];
  }
}

/// Bytes of shared memory that a block needs.
inline int swap_shared_bytes(int k, int lru_slots) {
  return static_cast<int>(sizeof(SwapShared)) + (k + 1) / 2 * 2 * 2 + (lru_slots + 3) / 4 * 4;
}

}  // namespace nsa_kv_offload
