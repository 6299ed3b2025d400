// The kernels of decode KV offloading, as functions for the CPU. Compiled with the kernels'
// folder on the include path; ENTRIES and ROW_BYTES list the instances, TABLE_PLACES is the swap's.
#include "cuda_on_cpu.h"
// (the kernels below see the names above as CUDA's own)
#include "gather.cuh"
#include "store.cuh"
#include "swap.cuh"

namespace nsa_kv_offload {

constexpr int kThreads = 64, kRows = 4, kTablePlaces = TABLE_PLACES;
uint32_t shared_memory[(256 << 10) / 4];

namespace {

template <int... kThreadEntries>
const char* run_swap(int entries, const SwapParams& params, int batch, int order, unsigned seed) {
  const char* error = "no swap kernel of this size was built";
  ((entries == kThreadEntries
        ? void(error = cuda_on_cpu::launch(
                   batch, kThreads, static_cast<cuda_on_cpu::Order>(order), seed, shared_memory,
                   swap_shared_bytes<kTablePlaces>(params.entries, params.lru_slots),
                   [&] { swap_kernel<kThreads, kThreadEntries, kTablePlaces>(params); }))
        : void()),
   ...);
  return error;
}

template <int... kRowBytes>
const char* run_gather(int row_bytes, const GatherParams& params, int blocks, int order, unsigned seed) {
  const char* error = "no gather kernel of this size was built";
  ((row_bytes == kRowBytes
        ? void(error = cuda_on_cpu::launch(
                   blocks, kThreads, static_cast<cuda_on_cpu::Order>(order), seed, shared_memory, sizeof(shared_memory),
                   [&] { gather_kernel<kThreads, kRowBytes, kRows>(params); }))
        : void()),
   ...);
  return error;
}

template <int... kRowBytes>
const char* run_store(int row_bytes, const StoreParams& params, int blocks, int order, unsigned seed) {
  const char* error = "no store kernel of this size was built";
  ((row_bytes == kRowBytes
        ? void(error = cuda_on_cpu::launch(
                   blocks, kThreads, static_cast<cuda_on_cpu::Order>(order), seed, shared_memory, sizeof(shared_memory),
                   [&] { store_kernel<kThreads, kRowBytes, kRows>(params); }))
        : void()),
   ...);
  return error;
}

}  // namespace
}  // namespace nsa_kv_offload

using namespace nsa_kv_offload;

extern "C" const char* nsa_swap(int entries, const SwapParams* params, int batch, int order, unsigned seed) {
  return run_swap<ENTRIES>(entries, *params, batch, order, seed);
}

extern "C" int nsa_swap_shared_bytes(int entries, int lru_slots) { return swap_shared_bytes<kTablePlaces>(entries, lru_slots); }

extern "C" const char* nsa_gather(int row_bytes, const GatherParams* params, int blocks, int order, unsigned seed) {
  return run_gather<ROW_BYTES>(row_bytes, *params, blocks, order, seed);
}

extern "C" const char* nsa_store(int row_bytes, const StoreParams* params, int blocks, int order, unsigned seed) {
  return run_store<ROW_BYTES>(row_bytes, *params, blocks, order, seed);
}
