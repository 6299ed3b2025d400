#include <sgl_kernel/tensor.h>
#include <sgl_kernel/utils.h>

#include <sgl_kernel/utils.cuh>

#include "gather.cuh"
#include "store.cuh"
#include "swap.cuh"
#include <cstdint>
#include <tvm/ffi/container/tensor.h>

namespace nsa_kv_offload {

constexpr int kMaxSharedBytes = 227 << 10;  // of a block that asks for it, on Hopper and on data centre Blackwell

inline MissQueue view_queue(
    const tvm::ffi::TensorView host_slots,
    const tvm::ffi::TensorView device_slots,
    const tvm::ffi::TensorView wanted,
    const tvm::ffi::TensorView target,
    const tvm::ffi::TensorView state) {
  using namespace host;
  auto device = SymbolicDevice{};
  auto capacity = SymbolicSize{"queue lists"};
  TensorMatcher({capacity}).with_dtype<int32_t>().with_device<kDLCUDA>(device).verify(host_slots).verify(device_slots);
  // A matcher holds on to the first size it sees, also where any is allowed.
  TensorMatcher({-1}).with_dtype<int32_t>().with_device<kDLCUDA>(device).verify(wanted);
  TensorMatcher({-1}).with_dtype<int32_t>().with_device<kDLCUDA>(device).verify(target);
  TensorMatcher({kNumStates}).with_dtype<int32_t>().with_device<kDLCUDA>(device).verify(state);
  return {
      static_cast<int32_t*>(host_slots.data_ptr()),
      static_cast<int32_t*>(device_slots.data_ptr()),
      static_cast<uint32_t*>(wanted.data_ptr()),
      static_cast<int32_t*>(target.data_ptr()),
      static_cast<int32_t*>(state.data_ptr()),
      static_cast<int>(capacity.unwrap() / 2)};
}

template <int kThreads, int kThreadEntries, int kTablePlaces>
struct Swap {
  static void
  run(const tvm::ffi::TensorView topk,
      const tvm::ffi::TensorView batch_windows,
      const tvm::ffi::TensorView request_rows,
      const tvm::ffi::TensorView seq_lens,
      const tvm::ffi::TensorView ring_begin,
      const tvm::ffi::TensorView req_to_token,
      const tvm::ffi::TensorView position_at_offset,
      const tvm::ffi::TensorView last_used,
      const tvm::ffi::TensorView counters,
      const tvm::ffi::TensorView page_table,
      const tvm::ffi::TensorView host_slots,
      const tvm::ffi::TensorView device_slots,
      const tvm::ffi::TensorView wanted,
      const tvm::ffi::TensorView target,
      const tvm::ffi::TensorView state,
      const int64_t lasting,
      const int64_t ring_slots,
      const int64_t first_window_slot,
      const int64_t window_slots) {
    using namespace host;
    auto B = SymbolicSize{"batch"};
    auto E = SymbolicSize{"entries"};
    auto N = SymbolicSize{"windows"};
    auto W = SymbolicSize{"LRU slots"};
    auto R = SymbolicSize{"request row stride"};
    auto device = SymbolicDevice{};
    TensorMatcher({B, E}).with_dtype<int32_t>().with_device<kDLCUDA>(device).verify(topk).verify(page_table);
    TensorMatcher({B})
        .with_dtype<int32_t>()
        .with_device<kDLCUDA>(device)
        .verify(batch_windows)
        .verify(request_rows)
        .verify(seq_lens);
    TensorMatcher({N}).with_dtype<int32_t>().with_device<kDLCUDA>(device).verify(ring_begin);
    TensorMatcher({-1, -1})
        .with_strides({R, 1})
        .with_dtype<int32_t>()
        .with_device<kDLCUDA>(device)
        .verify(req_to_token);
    TensorMatcher({N, W}).with_dtype<int32_t>().with_device<kDLCUDA>(device).verify(position_at_offset);
    TensorMatcher({N, W}).with_dtype<int16_t>().with_device<kDLCUDA>(device).verify(last_used);
    TensorMatcher({3}).with_dtype<int64_t>().with_device<kDLCUDA>(device).verify(counters);
    const int batch = static_cast<int>(B.unwrap());
    const int entries = static_cast<int>(E.unwrap());
    const int lru_slots = static_cast<int>(W.unwrap());
    RuntimeCheck(entries <= lru_slots && lru_slots <= 1 << 15, entries, " entries over ", lru_slots, " LRU slots");
    RuntimeCheck(lru_slots % kMarksPerWord == 0, lru_slots, " LRU slots are no multiple of ", kMarksPerWord);
    const int shared_bytes = swap_shared_bytes<kTablePlaces>(entries, lru_slots);
    RuntimeCheck(shared_bytes <= kMaxSharedBytes, entries, " entries and ", lru_slots, " LRU slots exceed shared memory");
    const auto is_aligned = [](const void* data, size_t bytes) { return reinterpret_cast<uintptr_t>(data) % bytes == 0; };
    RuntimeCheck(
        is_aligned(position_at_offset.data_ptr(), sizeof(int4)) && is_aligned(last_used.data_ptr(), sizeof(uint2)),
        "a window's tables are not aligned to vector loads");
    RuntimeCheck(entries <= kThreads * kThreadEntries, entries, " entries are above ", kThreads * kThreadEntries);
    // No window stands twice in a batch, and padded rows queue nothing.
    const int64_t requests = batch < N.unwrap() ? batch : N.unwrap();
    const int64_t most = requests * entries;
    RuntimeCheck(host_slots.size(0) / 2 >= most, "the miss queue holds fewer than ", most, " entries");
    if (batch == 0) return;

    const auto params = SwapParams{
        static_cast<const int32_t*>(topk.data_ptr()),
        static_cast<const int32_t*>(batch_windows.data_ptr()),
        static_cast<const int32_t*>(request_rows.data_ptr()),
        static_cast<const int32_t*>(seq_lens.data_ptr()),
        static_cast<const int32_t*>(ring_begin.data_ptr()),
        static_cast<const int32_t*>(req_to_token.data_ptr()),
        static_cast<int32_t*>(position_at_offset.data_ptr()),
        static_cast<uint16_t*>(last_used.data_ptr()),
        static_cast<unsigned long long*>(counters.data_ptr()),
        static_cast<int32_t*>(page_table.data_ptr()),
        view_queue(host_slots, device_slots, wanted, target, state),
        R.unwrap(),
        entries,
        static_cast<int>(lasting),
        lru_slots,
        static_cast<int>(ring_slots),
        static_cast<int>(first_window_slot),
        static_cast<int>(window_slots)};
    constexpr auto kernel = swap_kernel<kThreads, kThreadEntries, kTablePlaces>;
    // Never less than an earlier launch of the same instance needs, whose graph may be instantiated later.
    RuntimeDeviceCheck(::cudaFuncSetAttribute(kernel, ::cudaFuncAttributeMaxDynamicSharedMemorySize, kMaxSharedBytes));
    LaunchKernel(batch, kThreads, device.unwrap(), shared_bytes)(kernel, params);
  }
};

template <int kThreads, int kRowBytes, int kRows>
struct Gather {
  static void
  run(const tvm::ffi::TensorView host_rows,
      const tvm::ffi::TensorView device_rows,
      const tvm::ffi::TensorView host_slots,
      const tvm::ffi::TensorView device_slots,
      const tvm::ffi::TensorView wanted,
      const tvm::ffi::TensorView target,
      const tvm::ffi::TensorView state,
      const int64_t order_min_rows,
      const int64_t blocks) {
    using namespace host;
    auto N = SymbolicSize{"host rows"};
    auto device = SymbolicDevice{};
    TensorMatcher({N, kRowBytes}).with_dtype<uint8_t>().with_device<kDLCUDAHost, kDLCPU>().verify(host_rows);
    TensorMatcher({-1, kRowBytes}).with_dtype<uint8_t>().with_device<kDLCUDA>(device).verify(device_rows);
    RuntimeCheck(
        target.size(0) >= N.unwrap() && wanted.size(0) * 32 >= N.unwrap(),
        "the miss queue has fewer host slots than ",
        N.unwrap());
    const auto params = GatherParams{
        static_cast<const uint8_t*>(host_rows.data_ptr()),
        static_cast<uint8_t*>(device_rows.data_ptr()),
        view_queue(host_slots, device_slots, wanted, target, state),
        static_cast<int>(N.unwrap()),
        static_cast<int>(order_min_rows)};
    // Overlaps its launch with the end of the swap before it.
    LaunchKernel(blocks, kThreads, device.unwrap(), sizeof(GatherShared))
        .enable_pdl(true)(gather_kernel<kThreads, kRowBytes, kRows>, params);
  }
};

template <int kThreads, int kRowBytes, int kInFlight>
struct Store {
  static void
  run(const tvm::ffi::TensorView device_layers,
      const tvm::ffi::TensorView host_layers,
      const tvm::ffi::TensorView device_slots,
      const tvm::ffi::TensorView host_slots,
      const int64_t blocks) {
    using namespace host;
    auto L = SymbolicSize{"layers"};
    auto N = SymbolicSize{"rows"};
    auto device = SymbolicDevice{};
    TensorMatcher({L}).with_dtype<uint64_t>().with_device<kDLCUDA>(device).verify(device_layers).verify(host_layers);
    TensorMatcher({N}).with_dtype<int64_t>().with_device<kDLCUDA>(device).verify(device_slots).verify(host_slots);
    const int64_t tiles = (N.unwrap() + kStoreTile - 1) / kStoreTile * L.unwrap();
    RuntimeCheck(N.unwrap() < 1 << 30 && tiles < 1 << 30, N.unwrap(), " rows of ", L.unwrap(), " layers are too many");
    if (tiles == 0) return;
    const auto params = StoreParams{
        static_cast<const uint64_t*>(device_layers.data_ptr()),
        static_cast<const uint64_t*>(host_layers.data_ptr()),
        static_cast<const int64_t*>(device_slots.data_ptr()),
        static_cast<const int64_t*>(host_slots.data_ptr()),
        static_cast<int>(N.unwrap()),
        static_cast<int>(L.unwrap())};
    LaunchKernel(blocks < tiles ? blocks : tiles, kThreads, device.unwrap(), sizeof(StoreShared))(
        store_kernel<kThreads, kRowBytes, kInFlight>, params);
  }
};

}  // namespace nsa_kv_offload
