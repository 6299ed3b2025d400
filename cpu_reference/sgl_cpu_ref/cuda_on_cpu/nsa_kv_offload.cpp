// The swap and gather kernels of decode KV offloading, as functions for the CPU. Compiled with the kernels'
// folder on the include path; ENTRIES and ROW_BYTES list the instances.
#include "cuda_on_cpu.h"
// (the kernels below see the names above as CUDA's own)
#include "gather.cuh"
#include "swap.cuh"

namespace nsa_kv_offload {

constexpr int kThreads = 64, kRows = 4;
uint32_t shared_memory[(64 << 10) / 4];

namespace {

template <int kEntries, typename SeqLen>
const char* run_swap(const SwapParams<int32_t>& same, const void* seq_lens, int batch, int order, unsigned seed) {
  SwapParams<SeqLen> params{
      same.topk, same.batch_windows, same.batch_rows, static_cast<const SeqLen*>(seq_lens), same.ring_begin,
      same.req_to_token, same.offset_of_position, same.position_at_offset, same.last_used, same.counters,
      same.page_table, same.queue, same.row_stride, same.context, same.k, same.lru_slots, same.ring_slots,
      same.first_window_slot, same.window_slots};
  return cuda_on_cpu::launch(
      batch, kThreads, static_cast<cuda_on_cpu::Order>(order), seed, shared_memory,
      swap_shared_bytes(same.k, same.lru_slots), [&] { swap_kernel<kThreads, kEntries, SeqLen>(params); });
}

template <int... kEntries>
const char* run_swap(int entries, bool wide, const SwapParams<int32_t>& params, const void* lengths, int batch, int order, unsigned seed) {
  const char* error = "no swap kernel of this size was built";
  ((entries == kEntries
        ? void(error = wide ? run_swap<kEntries, int64_t>(params, lengths, batch, order, seed)
                            : run_swap<kEntries, int32_t>(params, lengths, batch, order, seed))
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

}  // namespace
}  // namespace nsa_kv_offload

using namespace nsa_kv_offload;

extern "C" const char* nsa_swap(
    int entries, const SwapParams<int32_t>* params, const void* seq_lens, int wide_lengths, int batch, int order, unsigned seed) {
  return run_swap<ENTRIES>(entries, wide_lengths != 0, *params, seq_lens, batch, order, seed);
}

extern "C" const char* nsa_gather(int row_bytes, const GatherParams* params, int blocks, int order, unsigned seed) {
  return run_gather<ROW_BYTES>(row_bytes, *params, blocks, order, seed);
}
