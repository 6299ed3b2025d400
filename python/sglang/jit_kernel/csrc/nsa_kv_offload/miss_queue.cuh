#pragma once

#include <cstdint>

namespace nsa_kv_offload {

/// Rows that a swap wants from the host, and where they go. The swap kernel fills it, the gather kernel
/// of the same layer empties it, and the boundary between the two launches orders them. A null `wanted`
/// means a plain list; otherwise a bit for each host slot puts the rows in address order without a sort,
/// and the list takes only rows wanted a second time (a shared prefix).
struct MissQueue {
  int32_t* host_slots;    // [capacity] the list; capacity is batch x top-k
  int32_t* device_slots;  // [capacity]
  uint32_t* wanted;       // [ceil(host rows / 32)] all zero between layers; null for a plain list
  int32_t* target;        // [host rows] device slot of a wanted host slot
  int32_t* state;         // [kNumStates] all zero between layers
};

enum MissQueueState : int {
  kMisses,   // rows wanted, however queued
  kListed,   // entries of the list
  kLeaving,  // gather blocks that are done
  kNumStates,
};

}  // namespace nsa_kv_offload
