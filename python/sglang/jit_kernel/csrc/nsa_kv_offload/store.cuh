/// Copies rows of some layers from the device to the host pool.
///
/// A block takes up to kStoreTile rows of one layer as one run of 16-byte units: no lane idles at a row's end, and
/// rows that lie side by side on the host, as a prompt's do, go over the link in whole lines.
#pragma once

#include <sgl_kernel/utils.cuh>

#include <cstdint>

namespace nsa_kv_offload {

constexpr int kStoreTile = 64;

struct StoreParams {
  const uint64_t* device_layers;  // [num_layers] addresses
  const uint64_t* host_layers;    // [num_layers] addresses, pinned or managed
  const int64_t* device_slots;    // [num_rows]
  const int64_t* host_slots;      // [num_rows]
  int num_rows;
  int num_layers;
};

struct StoreShared {
  int64_t device_slots[kStoreTile];
  int64_t host_slots[kStoreTile];
};

template <int kThreads, int kRowBytes, int kInFlight>
__global__ void __launch_bounds__(kThreads) store_kernel(const StoreParams params) {
  extern __shared__ uint32_t shared_memory[];
  StoreShared& shared = *reinterpret_cast<StoreShared*>(shared_memory);
  constexpr int kUnits = kRowBytes / sizeof(uint4);
  static_assert(kRowBytes % sizeof(uint4) == 0 && kThreads >= kStoreTile);
  const int thread = threadIdx.x;
  const int layer_tiles = (params.num_rows + kStoreTile - 1) / kStoreTile;
  for (int tile = blockIdx.x; tile < layer_tiles * params.num_layers; tile += gridDim.x) {
    const int layer = tile / layer_tiles, first_row = tile % layer_tiles * kStoreTile;
    const int rest = params.num_rows - first_row, rows = rest < kStoreTile ? rest : kStoreTile;
    const auto* device_rows = reinterpret_cast<const uint4*>(params.device_layers[layer]);
    auto* host_rows = reinterpret_cast<uint4*>(params.host_layers[layer]);
    __syncthreads();  // the tile before has been read
    if (thread < rows) {
      shared.device_slots[thread] = params.device_slots[first_row + thread];
      shared.host_slots[thread] = params.host_slots[first_row + thread];
    }
    __syncthreads();
    for (int first = thread; first < rows * kUnits; first += kThreads * kInFlight) {
      uint4 values[kInFlight];
#pragma unroll
      for (int i = 0; i < kInFlight; ++i) {
        const int unit = first + i * kThreads, row = unit / kUnits;
        if (row < rows) values[i] = device_rows[shared.device_slots[row] * kUnits + unit % kUnits];
      }
#pragma unroll
      for (int i = 0; i < kInFlight; ++i) {
        const int unit = first + i * kThreads, row = unit / kUnits;
        if (row < rows) host_rows[shared.host_slots[row] * kUnits + unit % kUnits] = values[i];
      }
    }
  }
}

}  // namespace nsa_kv_offload
