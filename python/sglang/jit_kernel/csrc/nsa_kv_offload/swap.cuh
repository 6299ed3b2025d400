/// One layer's swap of a decode step: which rows of the top-k are in the request's window, which device
/// slots the others get, and what to load. One block a batch row; nothing is copied here.
///
/// Words: *position* in a sequence; *host slot*, row of the host pool; *window offset*, slot in a request's
/// window; *device slot*, row of the device buffer; *place*, in the table of a top-k.
#pragma once

#include <sgl_kernel/utils.cuh>

#include "miss_queue.cuh"
#include "scan.cuh"

namespace nsa_kv_offload {

constexpr int16_t kAbsent = -1;      // of an entry whose row is in no window offset
constexpr int kDraftAge = 1 << 14;   // of a row that only drafts selected: goes before used ones, after empty slots
constexpr int kTouched = 1;          // mark of a slot that only drafts of this step select
constexpr int kUsed = 2;             // mark of a slot that this step's top-k uses; 0 for all others
constexpr int kMarksPerWord = 4;

struct SwapParams {
  const int32_t* topk;           // [batch, entries] positions, -1 for none; of several queries, one after the other
  const int32_t* batch_windows;  // [batch] -1 for padding
  const int32_t* request_rows;   // [batch]
  const int32_t* seq_lens;       // [batch] with this step's tokens
  const int32_t* ring_begin;     // [windows] first position that decoding wrote to the ring
  const int32_t* req_to_token;   // [rows, row_stride] host slots
  int32_t* position_at_offset;   // [windows, lru_slots] -1 where empty
  uint16_t* last_used;           // [windows, lru_slots] low bits of the sequence length
  unsigned long long* counters;  // [3] hits, ring hits, misses
  int32_t* page_table;           // [batch, entries] out: device slots
  MissQueue queue;
  int64_t row_stride;
  int entries;
  int lasting;    // entries before it are of a token that stays; the others' drafts may be refused
  int lru_slots;  // a multiple of kMarksPerWord
  int ring_slots;
  int first_window_slot;
  int window_slots;
};

/// Shared memory of a block; behind it lie `SharedArrays`.
struct SwapShared {
  int scan_sums[2][kMaxWarps];
  int search_sums[2][kMaxWarps];
  unsigned tallies[kMaxWarps];
  int queued_before;
};

/// The top-k of a block's request, and a table of it: place `position % kTablePlaces` names one entry whose position falls
/// on it. A place that no entry wrote holds noise: what is found counts if that entry's position is the one.
template <int kTablePlaces>
struct SharedArrays {
  uint32_t* table;           // [kTablePlaces / 2] two places a word, half the table apart, so that neighbours use two words
  int32_t* entry_positions;  // [entries] -1 for what is not looked up
  uint32_t* mark_words;      // [lru_slots / kMarksPerWord] a byte a slot
  int16_t* entry_offsets;    // [entries] window offsets of the rows, kAbsent until an entry has one
  uint16_t* victims;         // [entries] window offsets

  __device__ __forceinline__ SharedArrays(void* memory, int entries, int lru_slots) {
    table = static_cast<uint32_t*>(memory);
    entry_positions = reinterpret_cast<int32_t*>(table + kTablePlaces / 2);
    mark_words = reinterpret_cast<uint32_t*>(entry_positions + entries);
    entry_offsets = reinterpret_cast<int16_t*>(mark_words + lru_slots / kMarksPerWord);
    victims = reinterpret_cast<uint16_t*>(entry_offsets + entries);
  }

  static __device__ __forceinline__ int shift_of(int position) {
    return static_cast<unsigned>(position) / (kTablePlaces / 2) % 2 * 16;
  }

  __device__ __forceinline__ uint32_t* word_of(int position) const {
    return table + static_cast<unsigned>(position) % (kTablePlaces / 2);
  }

  __device__ __forceinline__ int entry_at(int position) const { return *word_of(position) >> shift_of(position) & 0xffff; }

  /// Of several at one place the last one stays.
  __device__ __forceinline__ void put_entry(int position, int entry) const {
    uint32_t* word = word_of(position);
    const int shift = shift_of(position);
    for (uint32_t seen = atomicOr(word, 0u);;) {
      const uint32_t before = atomicCAS(word, seen, (seen & ~(0xffffu << shift)) | static_cast<uint32_t>(entry) << shift);
      if (before == seen) return;
      seen = before;
    }
  }

  static constexpr int bytes(int entries, int lru_slots) { return entries * (4 + 2 + 2) + kTablePlaces * 2 + lru_slots; }
};

constexpr int kOldest = 127;  // no age_bucket is above; 7 bisections

/// Ages below 16 have a bucket each, older ones eight for each power of two; from 1 up, 0 is for touched slots.
__device__ __forceinline__ int age_bucket(uint16_t age) {
  if (age < 16) return 1 + age;
  const int exponent = 31 - __clz(static_cast<int>(age));
  return 17 + (exponent - 4) * 8 + ((age >> (exponent - 3)) & 7);
}

/// The slots of a window that a thread owns, a word of marks at a time: neighbours, so that thread order is the order of the
/// offsets. The first word's tables are loaded at once; more are of windows above kThreads * kMarksPerWord slots.
template <int kThreads>
struct OwnSlots {
  uint32_t* words;
  uint2* last_used;
  const int4* position_at;
  int first, end;
  uint2 first_stamps;
  int4 first_held;

  __device__ __forceinline__ OwnSlots(uint32_t* words, uint16_t* last_used, const int32_t* position_at, int lru_slots)
      : words(words),
        last_used(reinterpret_cast<uint2*>(last_used)),
        position_at(reinterpret_cast<const int4*>(position_at)) {
    const int num_words = lru_slots / kMarksPerWord;
    const int share = (num_words + kThreads - 1) / kThreads;
    first = threadIdx.x * share;
    end = first + share < num_words ? first + share : num_words;
    for (int word = first; word < end; ++word) words[word] = 0;
    if (first >= end) return;
    first_stamps = this->last_used[first];
    first_held = this->position_at[first];
  }

  /// Four stamps, 16 bits each.
  __device__ __forceinline__ uint2 stamps(int word) const { return word == first ? first_stamps : last_used[word]; }
  /// Four positions, -1 where a slot is empty.
  __device__ __forceinline__ int4 held(int word) const { return word == first ? first_held : position_at[word]; }

  /// Mark the slots whose position an entry asks for, and tell the entry.
  template <int kTablePlaces>
  __device__ __forceinline__ void answer(const SharedArrays<kTablePlaces>& arrays, int entries, int lasting) {
    for (int word = first; word < end; ++word) {
      const int4 positions = held(word);
      uint32_t marks = words[word];
#pragma unroll
      for (int i = 0; i < kMarksPerWord; ++i) {
        const int position = i == 0 ? positions.x : i == 1 ? positions.y : i == 2 ? positions.z : positions.w;
        if (position < 0) continue;
        const int entry = arrays.entry_at(position);
        if (entry >= entries || arrays.entry_positions[entry] != position) continue;
        arrays.entry_offsets[entry] = static_cast<int16_t>(word * kMarksPerWord + i);
        marks |= static_cast<uint32_t>(entry < lasting ? kUsed : kTouched) << 8 * i;
      }
      words[word] = marks;
    }
  }

  /// Slots that hits used are young again.
  __device__ __forceinline__ void renew_used(uint16_t now) const {
    for (int word = first; word < end; ++word) {
      const uint32_t used = words[word] & kUsed * 0x01010101u;
      if (used == 0) continue;
      uint2 renewed = stamps(word);
      const uint32_t both = now | static_cast<uint32_t>(now) << 16;
      const uint32_t low = (used & 0xff ? 0xffffu : 0u) | (used & 0xff00 ? 0xffff0000u : 0u);
      const uint32_t high = (used & 0xff0000 ? 0xffffu : 0u) | (used & 0xff000000 ? 0xffff0000u : 0u);
      renewed.x = (renewed.x & ~low) | (both & low);
      renewed.y = (renewed.y & ~high) | (both & high);
      last_used[word] = renewed;
    }
  }

  /// From here on a mark says when its slot may go: its age bucket, 0 for never.
  __device__ __forceinline__ void put_ages(uint16_t now) {
    for (int word = first; word < end; ++word) {
      const uint2 used_at = stamps(word);
      const uint32_t touched = words[word];
      uint32_t ages = 0;
#pragma unroll
      for (int i = 0; i < kMarksPerWord; ++i) {
        // A stamp may have wrapped to the age of a touched slot; only the mark decides who may be evicted.
        const uint16_t age = now - static_cast<uint16_t>((i < 2 ? used_at.x : used_at.y) >> 16 * (i % 2));
        if (!(touched >> 8 * i & 0xff)) ages |= static_cast<uint32_t>(age_bucket(age)) << 8 * i;
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
/// than a boundary bucket, then from the boundary, each in the order of the offsets.
///
/// At least `need` slots are untouched, since a top-k has no more entries than a window has slots.
template <int kThreads>
__device__ __forceinline__ void pick_victims(
    OwnSlots<kThreads>& slots, uint16_t now, int need, uint16_t* victims, SwapShared& shared) {
  slots.put_ages(now);
  // The boundary is the oldest bucket that `need` slots reach: by bisection, since a histogram has all threads
  // add to the few buckets of the last steps.
  int boundary = 1, too_old = kOldest + 1, num_older_in_block = 0;
  for (int half = 0; boundary + 1 < too_old; half ^= 1) {
    const int middle = (boundary + too_old) / 2;
    const int count = sum_block<kThreads>(slots.count_from(middle), shared.search_sums[half]);
    if (count >= need) {
      boundary = middle;
    } else {
      too_old = middle;
      num_older_in_block = count;
    }
  }
  const int num_older = slots.count_from(boundary + 1), num_boundary = slots.count_from(boundary) - num_older;
  // Both counts fit 16 bits: a window has at most 2^15 slots.
  const int before = scan_block<kThreads>(num_older | num_boundary << 16, shared.scan_sums[1]).before;
  int older_rank = before & 0xffff, boundary_rank = num_older_in_block + (before >> 16);
  for (int word = slots.first; word < slots.end; ++word) {
#pragma unroll
    for (int i = 0; i < kMarksPerWord; ++i) {
      const int bucket = slots.words[word] >> 8 * i & 0xff, offset = word * kMarksPerWord + i;
      if (bucket < boundary || (bucket == boundary && boundary_rank >= need)) continue;
      victims[bucket > boundary ? older_rank++ : boundary_rank++] = offset;
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

/// A slot's owner looks up in a table of the top-k whether any entry asks for what the slot holds: so what is read from
/// memory is the window's positions and stamps, in whole lines, and lookups stay in shared memory. Entries of a thread
/// are neighbours in the top-k, so that a thread-order scan ranks misses in top-k order. A load is issued as soon as its
/// address is known.
template <int kThreads, int kThreadEntries, int kTablePlaces>
__global__ void __launch_bounds__(kThreads) swap_kernel(const SwapParams params) {
  extern __shared__ uint32_t shared_memory[];
  SwapShared& shared = *reinterpret_cast<SwapShared*>(shared_memory);
  const SharedArrays<kTablePlaces> arrays(&shared + 1, params.entries, params.lru_slots);
  static_assert(kThreads % kWarpSize == 0 && kThreads <= kMaxWarps * kWarpSize && kThreadEntries <= 32);

  device::PDLTriggerSecondary<true>();  // the gather may start beside this; it waits for the end of it
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
  int32_t* position_at = params.position_at_offset + window * params.lru_slots;
  uint16_t* last_used = params.last_used + window * params.lru_slots;
  const int32_t* host_slot_of = params.req_to_token + params.request_rows[row] * params.row_stride;
  OwnSlots<kThreads> own_slots(arrays.mark_words, last_used, position_at, params.lru_slots);
  const int seq_len = params.seq_lens[row];
  const uint16_t now = static_cast<uint16_t>(seq_len);
  // Newer positions are in the ring, whatever they are: nothing past the sequence counts in a window.
  const int ring_begin = params.ring_begin[window];
  const int first_in_ring = ring_begin > seq_len - params.ring_slots ? ring_begin : seq_len - params.ring_slots;

  unsigned asking = 0;
#pragma unroll
  for (int e = 0; e < kThreadEntries; ++e) {
    const bool asks = positions[e] >= 0 && positions[e] < first_in_ring;
    asking |= static_cast<unsigned>(asks) << e;
    if (first_entry + e >= params.entries) continue;
    arrays.entry_positions[first_entry + e] = asks ? positions[e] : -1;
    arrays.entry_offsets[first_entry + e] = kAbsent;
  }
  // Of entries with the same position one speaks for all, and loads the row if it is absent; with drafts one that lasts, if any does.
  // Positions that share a place in the table take turns: each turn one of them has it.
  const bool has_drafts = params.lasting < params.entries;
  int speakers[kThreadEntries];
  for (unsigned waiting = asking;;) {
#pragma unroll
    for (int e = 0; e < kThreadEntries; ++e) {
      if (waiting >> e & 1) arrays.put_entry(positions[e], first_entry + e);
    }
    if (has_drafts) {
      __syncthreads();
#pragma unroll
      for (int e = 0; e < kThreadEntries; ++e) {
        if (first_entry + e < params.lasting && (waiting >> e & 1)) arrays.put_entry(positions[e], first_entry + e);
      }
    }
    __syncthreads();
#pragma unroll
    for (int e = 0; e < kThreadEntries; ++e) {
      if (!(waiting >> e & 1)) continue;
      speakers[e] = arrays.entry_at(positions[e]);
      if (arrays.entry_positions[speakers[e]] == positions[e]) waiting &= ~(1u << e);
    }
    own_slots.answer(arrays, params.entries, params.lasting);
    if (!__syncthreads_or(waiting != 0)) break;
  }

  unsigned missed = 0, duplicate = 0, num_hits = 0, num_in_ring = 0;
  int host_slots[kThreadEntries];
#pragma unroll
  for (int e = 0; e < kThreadEntries; ++e) {
    if (first_entry + e >= params.entries) continue;
    int slot = -1;
    if (asking >> e & 1) {
      const int offset = arrays.entry_offsets[speakers[e]];
      if (offset < 0) {
        if (speakers[e] != first_entry + e) {
          duplicate |= 1u << e;
        } else {
          missed |= 1u << e;
          host_slots[e] = host_slot_of[positions[e]];
        }
        continue;
      }
      slot = window_slot + offset;
      ++num_hits;
    } else if (positions[e] >= 0) {
      slot = window_slot + params.lru_slots + positions[e] % params.ring_slots;
      ++num_in_ring;
    }
    page_table[first_entry + e] = slot;
  }
  const unsigned tally = __reduce_add_sync(kFullWarp, num_hits | num_in_ring << 16);
  if (lane == 0) shared.tallies[warp] = tally;
  const bool any_missed = __syncthreads_or(missed != 0);
  own_slots.renew_used(now);
  count_hits<kThreads>(params, shared);
  if (!any_missed) return;

  const ScanResult misses = scan_block<kThreads>(__popc(missed), shared.scan_sums[0]);
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
  pick_victims<kThreads>(own_slots, now, misses.total, arrays.victims, shared);
  if (thread == 0) shared.queued_before = queued_before;
  __syncthreads();

  int rank = misses.before, index = shared.queued_before + misses.before;
#pragma unroll
  for (int e = 0; e < kThreadEntries; ++e) {
    if (!(missed >> e & 1)) continue;
    const int offset = arrays.victims[rank++];
    arrays.entry_offsets[first_entry + e] = static_cast<int16_t>(offset);
    position_at[offset] = positions[e];
    last_used[offset] = first_entry + e < params.lasting ? now : static_cast<uint16_t>(now - kDraftAge);
    const int slot = window_slot + offset;
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
  if (!__syncthreads_or(duplicate != 0)) return;
#pragma unroll
  for (int e = 0; e < kThreadEntries; ++e) {
    if (duplicate >> e & 1) page_table[first_entry + e] = window_slot + arrays.entry_offsets[speakers[e]];
  }
}

/// Bytes of shared memory that a block needs.
template <int kTablePlaces>
constexpr int swap_shared_bytes(int entries, int lru_slots) {
  return static_cast<int>(sizeof(SwapShared)) + SharedArrays<kTablePlaces>::bytes(entries, lru_slots);
}

}  // namespace nsa_kv_offload
