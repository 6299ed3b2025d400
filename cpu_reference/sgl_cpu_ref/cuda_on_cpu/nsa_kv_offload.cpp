// The swap and gather kernels of decode KV offloading, as functions for the CPU. Compiled with the kernels'
// folder on the include path and ENTRIES, ROW_BYTES defined.
#include "cuda_on_cpu.h"
// (the kernels below see the names above as CUDA's own)
#include "gather.cuh"
#include "swap.cuh"

namespace nsa_kv_offload {

constexpr int kThreads = 64, kRows = 4;
uint32_t shared_memory[(64 << 10) / 4];

namespace {

template <typename SeqLen>
const char* run_swap(const SwapParams<int32_t>& same, const void* seq_lens, int batch, int order, unsigned seed) {
  SwapParams<SeqLen> params{
      same.topk, same.batch_windows, same.batch_rows, static_cast<const SeqLen*>(seq_lens), same.ring_begin,
      same.req_to_token, same.offset_of_position, same.position_at_offset, same.last_used, same.counters,
      same.page_table, same.queue, same.row_stride, same.context, same.k, same.lru_slots, same.ring_slots,
      same.first_window_slot, same.window_slots};
  return cuda_on_cpu::launch(
      batch, kThreads, static_cast<cuda_on_cpu::Order>(order), seed, shared_memory,
      swap_shared_bytes(same.k, same.lru_slots), [&] { swap_kernel<kThreads, ENTRIES, SeqLen>(params); });
}

}  // namespace
}  // namespace nsa_kv_offload

using namespace nsa_kv_offload;

extern "C" const char* nsa_swap(
    const SwapParams<int32_t>* params, const void* seq_lens, int wide_lengths, int batch, int order, unsigned seed) {
  if (wide_lengths) return run_swap<int64_t>(*params, seq_lens, batch, order, seed);
  return run_swap<int32_t>(*params, seq_lens, batch, order, seed);
}

extern "C" const char* nsa_gather(const GatherParams* params, int blocks, int order, unsigned seed) {
  return cuda_on_cpu::launch(
      blocks, kThreads, static_cast<cuda_on_cpu::Order>(order), seed, shared_memory, sizeof(shared_memory),
      [&] { gather_kernel<kThreads, ROW_BYTES, kRows>(*params); });
}
