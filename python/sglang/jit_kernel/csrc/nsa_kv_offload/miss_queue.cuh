#pragma once

#include <cstdint>

namespace nsa_kv_offload {

/// Rows that a swap wants from the host, and where they go. The swap kernel fills it, the gather kernel
/// of the same layer empties it. Their launches overlap: what orders them is the gather's wait for the swap.
///
/// Every row is listed. A bit for each host slot also puts the rows in address order without a sort; a row wanted
/// a second time (a shared prefix) has no bit of its own and is listed again behind the first `capacity` entries.
struct MissQueue {
  int32_t* host_slots;    // [2 * capacity] the lists; capacity is batch x top-k
  int32_t* device_slots;  // [2 * capacity]
  uint32_t* wanted;       // [ceil(host rows / 32)] all zero between layers
  int32_t* target;        // [host rows] device slot of a wanted host slot
  int32_t* state;         // [kNumStates] all zero between layers
  int capacity;
};

enum MissQueueState : int {
  kMisses,   // rows wanted
  kAgain,    // of them without a bit of their own
  kChunks,   // pieces of `wanted` that gather blocks took after their first
  kLeaving,  // gather blocks that are done
  kNumStates,
};

}  // namespace nsa_kv_offload
