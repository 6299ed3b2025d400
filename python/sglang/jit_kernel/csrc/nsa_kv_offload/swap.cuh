/// One layer's swap of a decode step: which rows of the top-k are in the request's window, which device
/// slots the others get, and what to load. One block a batch row; nothing is copied here.
///
/// Words: *position* in a sequence; *host slot*, row of the host pool; *window offset*, slot in a request's
/// window; *device slot*, row of the device buffer.
#pragma once

#include <sgl_kernel/utils.cuh>

#include "miss_queue.cuh"
#include "scan.cuh"

namespace nsa_kv_offload {

constexpr int16_t kAbsent = -1;   // the position is in no window offset
constexpr int16_t kClaimed = -2;  // and below: absent, and entry (kClaimed - value) of this top-k loads it
constexpr int kDraftAge = 1 << 14;  // of a row that only drafts selected: goes before used ones, after empty slots
constexpr int kTouched = 1;      // mark of a slot that only drafts of this step select
constexpr int kUsed = 2;         // mark of a slot that this step's top-k uses; 0 for all others
constexpr int kMarksPerWord = 4;

struct SwapParams {
  const int32_t* topk;           // [batch, entries] positions, -1 for none; of several queries, one after the other
  const int32_t* batch_windows;  // [batch] -1 for padding
  const int32_t* request_rows;   // [batch]
  const int32_t* seq_lens;       // [batch] with this step's tokens
  const int32_t* ring_begin;     // [windows] first position that decoding wrote to the ring
  const int32_t* req_to_token;   // [rows, row_stride] host slots
  int16_t* offset_of_position;   // [windows, context]
  int32_t* position_at_offset;   // [windows, lru_slots]
  uint16_t* last_used;           // [windows, lru_slots] low bits of the sequence length
  unsigned long long* counters;  // [3] hits, ring hits, misses
  int32_t* page_table;           // [batch, entries] out: device slots
  MissQueue queue;
  int64_t row_stride;
  int64_t context;
  int entries;
  int lasting;  // entries before it are of a token that stays; the others' drafts may be refused
  int lru_slots;
  int ring_slots;
  int first_window_slot;
  int window_slots;
};

/// Shared memory of a block; behind it lie `victims` [entries] and `marks` [lru_slots], a byte a slot.
struct SwapShared {
  int scan_sums[2][kMaxWarps];
  int search_sums[2][kMaxWarps];
  unsigned tallies[kMaxWarps];
  int queued_before;
};

constexpr int kOldest = 127;  // no age_bucket is above; 7 bisections

/// Ages below 16 have a bucket each, older ones eight for each power of two; from 1 up, 0 is for touched slots.
__device__ __forceinline__ int age_bucket(uint16_t age) {
  if (age < 16) return 1 + age;
  const int exponent = 31 - __clz(static_cast<int>(age));
  return 17 + (exponent - 4) * 8 + ((age >> (exponent - 3)) & 7);
}

/// The words of marks that a thread owns: neighbours, so that thread order is the order of the offsets. What the first
/// needs from the tables is loaded early; more are rare, of windows above kThreads * kMarksPerWord.
template <int kThreads>
struct OwnMarks {
  uint32_t* words;
  uint16_t* last_used;
  const int32_t* position_at;
  int first, end, lru_slots;
  uint16_t stamps[kMarksPerWord];
  int held[kMarksPerWord];  // positions in the slots of the first word, -1 for none

  __device__ __forceinline__
  OwnMarks(uint32_t* words, uint16_t* last_used, const int32_t* position_at, int lru_slots)
      : words(words), last_used(last_used), position_at(position_at), lru_slots(lru_slots) {
    const int num_words = (lru_slots + kMarksPerWord - 1) / kMarksPerWord;
    const int share = (num_words + kThreads - 1) / kThreads;
    first = threadIdx.x * share;
    end = first + share < num_words ? first + share : num_words;
  }

  __device__ __forceinline__ bool has_slot(int word, int i) const {
    return word < end && word * kMarksPerWord + i < lru_slots;
  }

  __device__ __forceinline__ void load_stamps(int word) {
#pragma unroll
    for (int i = 0; i < kMarksPerWord; ++i) stamps[i] = has_slot(word, i) ? last_used[word * kMarksPerWord + i] : 0;
  }

  __device__ __forceinline__ void load_first() {
    load_stamps(first);
#pragma unroll
    for (int i = 0; i < kMarksPerWord; ++i) held[i] = has_slot(first, i) ? position_at[first * kMarksPerWord + i] : -1;
  }

  /// Slots that hits used are young again; here, since a warp's slots lie side by side, and its hits do not.
  __device__ __forceinline__ void renew_used(uint16_t now) const {
    for (int word = first; word < end; ++word) {
#pragma unroll
      for (int i = 0; i < kMarksPerWord; ++i) {
        if ((words[word] >> 8 * i & 0xff) == kUsed) last_used[word * kMarksPerWord + i] = now;
      }
    }
  }

  /// From here on a mark says when its slot may go: its age bucket, 0 for never.
  __device__ __forceinline__ void put_ages(uint16_t now) {
    for (int word = first; word < end; ++word) {
      if (word > first) load_stamps(word);
      const uint32_t touched = words[word];
      uint32_t ages = 0;
#pragma unroll
      for (int i = 0; i < kMarksPerWord; ++i) {
        // A stamp may have wrapped to the age of a touched slot; only the mark decides who may be evicted.
        const bool may_go = !(touched >> 8 * i & 0xff) && has_slot(word, i);
        if (may_go) ages |= static_cast<uint32_t>(age_bucket(static_cast<uint16_t>(now - stamps[i]))) << 8 * i;
      }
      words[word] = ages;
    }
  }

  /// How many slots are in a bucket from 1 up or an older one: a byte's top bit is free to say so.
  __device__ __forceinline__ int count_from(int bucket) const {
    const uint32_t to_top_bit = (0x80 - bucket) * 0x01010101u;
    int count = 0;
    for (int word = first; word < end; ++word) count += __popc((words[word] + to_top_bit) & 0x80808080u);
    return count;
  }
};

/// Write the offsets of the `need` least recently used, untouched slots to `victims`: first those older
/// than a boundary bucket, then from the boundary, each in the order of the offsets. What they hold leaves the table.
///
/// At least `need` slots are untouched, since a top-k has no more entries than a window has slots.
template <int kThreads>
__device__ __forceinline__ void pick_victims(
    OwnMarks<kThreads>& marks, uint16_t now, int need, uint16_t* victims, int16_t* offset_of, SwapShared& shared) {
  marks.put_ages(now);
  // The boundary is the oldest bucket that `need` slots reach: by bisection, since a histogram has all threads
  // add to the few buckets of the last steps.
  int boundary = 1, too_old = kOldest + 1, num_older_in_block = 0;
  for (int turn = 0; boundary + 1 < too_old; turn ^= 1) {
    const int middle = (boundary + too_old) / 2;
    const int count = sum_block<kThreads>(marks.count_from(middle), shared.search_sums[turn]);
    if (count >= need) {
      boundary = middle;
    } else {
      too_old = middle;
      num_older_in_block = count;
    }
  }
  const int num_older = marks.count_from(boundary + 1), num_boundary = marks.count_from(boundary) - num_older;
  // Both counts fit 16 bits: a window has at most 2^15 slots.
  const int before = scan_block<kThreads>(num_older | num_boundary << 16, shared.scan_sums[1]).before;
  int older_rank = before & 0xffff, boundary_rank = num_older_in_block + (before >> 16);
  for (int word = marks.first; word < marks.end; ++word) {
#pragma unroll
    for (int i = 0; i < kMarksPerWord; ++i) {
      const int bucket = marks.words[word] >> 8 * i & 0xff, offset = word * kMarksPerWord + i;
      if (bucket < boundary || (bucket == boundary && boundary_rank >= need)) continue;
      victims[bucket > boundary ? older_rank++ : boundary_rank++] = offset;
      const int evicted = word == marks.first ? marks.held[i] : marks.position_at[offset];
      if (evicted >= 0) offset_of[evicted] = kAbsent;
    }
  }
}

/// Add a block's hits and ring hits, which every thread has tallied, to the counters. Needs a barrier before.
template <int kThreads>
__device__ __forceinline__ void count_hits(const SwapParams& params, const SwapShared& shared) {
  if (threadIdx.x >= kWarpSize) return;
  const int lane = threadIdx.x;
  const unsigned sum = __reduce_add_sync(kFullWarp, lane < kThreads / kWarpSize ? shared.tallies[lane] : 0u);
  if (lane != 0) return;
  atomicAdd(&params.counters[0], static_cast<unsigned long long>(sum & 0xffffu));
  atomicAdd(&params.counters[1], static_cast<unsigned long long>(sum >> 16));
}

/// Entries of a thread are neighbours in the top-k, so that a thread-order scan ranks misses in top-k order.
/// A load is issued as soon as its address is known, whether or not it will be needed: the kernel's time is
/// the chain of loads that wait for each other.
template <int kThreads, int kThreadEntries>
__global__ void __launch_bounds__(kThreads) swap_kernel(const SwapParams params) {
  extern __shared__ uint32_t shared_memory[];
  SwapShared& shared = *reinterpret_cast<SwapShared*>(shared_memory);
  uint16_t* victims = reinterpret_cast<uint16_t*>(&shared + 1);
  uint32_t* mark_words = reinterpret_cast<uint32_t*>(victims + (params.entries + 1) / 2 * 2);
  uint8_t* marks = reinterpret_cast<uint8_t*>(mark_words);
  static_assert(kThreads % kWarpSize == 0 && kThreads <= kMaxWarps * kWarpSize && kThreadEntries <= 32);

  device::PDLTriggerSecondary<true>();  // the gather may take its places; it waits for the end of all this
  const int thread = threadIdx.x, lane = thread % kWarpSize, warp = thread / kWarpSize;
  const int64_t row = blockIdx.x;
  const int32_t* topk = params.topk + row * params.entries;
  int32_t* page_table = params.page_table + row * params.entries;
  const int first_entry = thread * kThreadEntries;
  int positions[kThreadEntries];
#pragma unroll
  for (int e = 0; e < kThreadEntries; ++e) positions[e] = first_entry + e < params.entries ? topk[first_entry + e] : -1;

  const int64_t window = params.batch_windows[row];
  if (window < 0) {
    // A padded row reads the dummy slot 0, as in the base, and owns nothing.
#pragma unroll
    for (int e = 0; e < kThreadEntries; ++e) {
      if (first_entry + e < params.entries) page_table[first_entry + e] = positions[e] < 0 ? -1 : 0;
    }
    return;
  }
  const int window_slot = params.first_window_slot + static_cast<int>(window) * params.window_slots;
  int16_t* offset_of = params.offset_of_position + window * params.context;
  int32_t* position_at = params.position_at_offset + window * params.lru_slots;
  uint16_t* last_used = params.last_used + window * params.lru_slots;
  const int32_t* host_slot_of = params.req_to_token + params.request_rows[row] * params.row_stride;
  int offsets[kThreadEntries];
#pragma unroll
  for (int e = 0; e < kThreadEntries; ++e) {
    const bool in_table = positions[e] >= 0 && positions[e] < params.context;
    offsets[e] = in_table ? offset_of[positions[e]] : kAbsent;
  }
  const int seq_len = params.seq_lens[row];
  const uint16_t now = static_cast<uint16_t>(seq_len);
  // Newer positions are in the ring, whatever they are: nothing past the sequence counts in a table.
  const int ring_begin = params.ring_begin[window];
  const int first_in_ring = ring_begin > seq_len - params.ring_slots ? ring_begin : seq_len - params.ring_slots;

  for (int i = thread; i < (params.lru_slots + kMarksPerWord - 1) / kMarksPerWord; i += kThreads) mark_words[i] = 0;
  // Of entries with the same position the one whose claim stays loads the row; the others read its offset below.
  unsigned absent = 0;
  int host_slots[kThreadEntries];
#pragma unroll
  for (int e = 0; e < kThreadEntries; ++e) {
    if (positions[e] < 0 || positions[e] >= first_in_ring || offsets[e] >= 0) continue;
    absent |= 1u << e;
    offset_of[positions[e]] = static_cast<int16_t>(kClaimed - (first_entry + e));
    host_slots[e] = host_slot_of[positions[e]];
  }
  const bool any_absent = __syncthreads_or(absent != 0);

  OwnMarks<kThreads> own_marks(mark_words, last_used, position_at, params.lru_slots);
  int claims[kThreadEntries];
  if (any_absent) {
#pragma unroll
    for (int e = 0; e < kThreadEntries; ++e) claims[e] = absent >> e & 1 ? offset_of[positions[e]] : kAbsent;
    own_marks.load_first();
  }
  // With drafts all slots are marked as theirs first: of equal entries one may be a draft's and one not.
  const bool has_drafts = params.lasting < params.entries;
  unsigned num_hits = 0, num_in_ring = 0;
#pragma unroll
  for (int e = 0; e < kThreadEntries; ++e) {
    if (first_entry + e >= params.entries || (absent >> e & 1)) continue;
    int slot = -1;
    if (positions[e] >= first_in_ring) {
      slot = window_slot + params.lru_slots + positions[e] % params.ring_slots;
      ++num_in_ring;
    } else if (offsets[e] >= 0) {
      slot = window_slot + offsets[e];
      marks[offsets[e]] = has_drafts ? kTouched : kUsed;
      ++num_hits;
    }
    page_table[first_entry + e] = slot;
  }
  if (has_drafts) {
    __syncthreads();
#pragma unroll
    for (int e = 0; e < kThreadEntries; ++e) {
      const bool lasts = first_entry + e < params.lasting && positions[e] >= 0 && positions[e] < first_in_ring;
      if (lasts && offsets[e] >= 0) marks[offsets[e]] = kUsed;
    }
  }
  const unsigned tally = __reduce_add_sync(kFullWarp, num_hits | num_in_ring << 16);
  if (lane == 0) shared.tallies[warp] = tally;
  if (!any_absent) {
    __syncthreads();
    own_marks.renew_used(now);
    count_hits<kThreads>(params, shared);
    return;
  }

  unsigned missed = 0;
#pragma unroll
  for (int e = 0; e < kThreadEntries; ++e) {
    const bool claimed = (absent >> e & 1) && claims[e] == kClaimed - (first_entry + e);
    missed |= static_cast<unsigned>(claimed) << e;
  }
  const ScanResult misses = scan_block<kThreads>(__popc(missed), shared.scan_sums[0]);
  own_marks.renew_used(now);
  count_hits<kThreads>(params, shared);

  const MissQueue& queue = params.queue;
  int queued_before = 0;
  if (thread == 0) {
    atomicAdd(&params.counters[2], static_cast<unsigned long long>(misses.total));
    queued_before = atomicAdd(&queue.state[kMisses], misses.total);
  }
  uint32_t wanted_before[kThreadEntries];
#pragma unroll
  for (int e = 0; e < kThreadEntries; ++e) {
    if (!(missed >> e & 1)) continue;
    wanted_before[e] = atomicOr(&queue.wanted[host_slots[e] / 32], 1u << (host_slots[e] % 32));
  }
  // The latency of the atomics passes meanwhile.
  pick_victims<kThreads>(own_marks, now, misses.total, victims, offset_of, shared);
  if (thread == 0) shared.queued_before = queued_before;
  __syncthreads();

  int rank = misses.before, index = shared.queued_before + misses.before;
#pragma unroll
  for (int e = 0; e < kThreadEntries; ++e) {
    if (!(missed >> e & 1)) continue;
    offsets[e] = victims[rank++];
    offset_of[positions[e]] = static_cast<int16_t>(offsets[e]);
    position_at[offsets[e]] = positions[e];
    last_used[offsets[e]] = first_entry + e < params.lasting ? now : static_cast<uint16_t>(now - kDraftAge);
    const int slot = window_slot + offsets[e];
    page_table[first_entry + e] = slot;
    queue.host_slots[index] = host_slots[e];
    queue.device_slots[index++] = slot;
    if (!(wanted_before[e] >> (host_slots[e] % 32) & 1)) {
      queue.target[host_slots[e]] = slot;
    } else {
      const int again = queue.capacity + atomicAdd(&queue.state[kAgain], 1);
      queue.host_slots[again] = host_slots[e];
      queue.device_slots[again] = slot;
    }
  }
  const unsigned duplicate = absent & ~missed;
  if (!__syncthreads_or(duplicate != 0)) return;
#pragma unroll
  for (int e = 0; e < kThreadEntries; ++e) {
    if (!(duplicate >> e & 1)) continue;
    const int offset = offset_of[positions[e]];
    page_table[first_entry + e] = window_slot + offset;
    if (first_entry + e < params.lasting) last_used[offset] = now;
  }
}

/// Bytes of shared memory that a block needs.
inline int swap_shared_bytes(int entries, int lru_slots) {
  return static_cast<int>(sizeof(SwapShared)) + (entries + 1) / 2 * 2 * 2 +
         (lru_slots + kMarksPerWord - 1) / kMarksPerWord * kMarksPerWord;
}

}  // namespace nsa_kv_offload
