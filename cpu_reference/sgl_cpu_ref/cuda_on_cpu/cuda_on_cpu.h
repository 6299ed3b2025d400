// Runs CUDA kernels on a CPU, a block at a time, for tests: enough of the language for kernels that meet only
// at barriers and warp exchanges. Blocks run one after another, so a kernel whose blocks wait for each other
// hangs here and is reported.
//
// Every thread of a block is a fiber that runs until it meets others. In which order is the caller's choice
// (forward, backward, by chance): a kernel that lacks a barrier gives another result in another order. What
// this cannot show: the order in which memory becomes visible, and real concurrency.
#pragma once

#include <setjmp.h>
#include <ucontext.h>

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <functional>
#include <random>
#include <vector>

#define __global__
#define __device__
#define __host__
#define __shared__
#define __forceinline__ inline
#define __launch_bounds__(...)

struct dim3 {
  unsigned x = 1, y = 1, z = 1;
};
struct alignas(8) uint2 {
  uint32_t x, y;
};
struct alignas(16) uint4 {
  uint32_t x, y, z, w;
};
struct alignas(16) int4 {
  int32_t x, y, z, w;
};

inline dim3 threadIdx, blockIdx, blockDim, gridDim;

namespace cuda_on_cpu {

constexpr int kMaxThreads = 1024, kWarp = 32;
constexpr size_t kStackBytes = 64 << 10;

enum Order : int { kForward, kBackward, kByChance };
enum class Waits { kNothing, kWarp, kBlock };

struct Fiber {
  jmp_buf place;
  ucontext_t first;
  std::vector<char> stack;
  bool begun = false, done = false;
  Waits waits = Waits::kNothing;
  int warp_phase = 0, block_phase = 0;
  // What a thread shows to its warp and to its block; two of each, so that a fast thread's next exchange
  // leaves alone what slow ones have yet to read.
  uint64_t for_warp[2], for_block[2];
};

struct Machine {
  std::vector<Fiber> fibers = std::vector<Fiber>(kMaxThreads);
  std::function<void()> kernel;
  int threads = 0, current = 0;
  jmp_buf scheduler;
  ucontext_t scheduler_context;
  const char* error = nullptr;
  std::mt19937 random;
};
inline Machine machine;

inline Fiber& self() { return machine.fibers[machine.current]; }

inline void suspend(Waits reason) {
  Fiber& fiber = self();
  fiber.waits = reason;
  if (_setjmp(fiber.place) == 0) _longjmp(machine.scheduler, 1);
}

// A fiber serves one thread number through many blocks and launches: to begin one costs system calls.
inline void fiber_main() {
  for (;;) {
    machine.kernel();
    self().done = true;
    suspend(Waits::kNothing);
  }
}

inline void run_until_it_waits(int thread) {
  machine.current = thread;
  threadIdx.x = static_cast<unsigned>(thread);
  Fiber& fiber = machine.fibers[thread];
  if (_setjmp(machine.scheduler) != 0) return;
  if (fiber.begun) _longjmp(fiber.place, 1);
  fiber.begun = true;
  getcontext(&fiber.first);
  fiber.stack.resize(kStackBytes);
  fiber.first.uc_stack.ss_sp = fiber.stack.data();
  fiber.first.uc_stack.ss_size = kStackBytes;
  fiber.first.uc_link = nullptr;
  makecontext(&fiber.first, fiber_main, 0);
  setcontext(&fiber.first);
}

// Let go the threads of [begin, end) if all that are left wait for `reason`; returns whether it did.
inline bool release(int begin, int end, Waits reason) {
  int waiting = 0;
  for (int i = begin; i < end; ++i) {
    const Fiber& fiber = machine.fibers[i];
    if (fiber.done) continue;
    if (fiber.waits != reason) return false;
    ++waiting;
  }
  if (reason == Waits::kWarp && waiting > 0 && waiting < end - begin) {
    machine.error = "an exchange of a warp whose lanes have ended in part";
  }
  for (int i = begin; i < end; ++i) machine.fibers[i].waits = Waits::kNothing;
  return waiting > 0;
}

inline void run_block(Order order) {
  const int threads = machine.threads;
  std::vector<int> turns(threads);
  for (int i = 0; i < threads; ++i) {
    turns[i] = order == kBackward ? threads - 1 - i : i;
    Fiber& fiber = machine.fibers[i];
    fiber.done = false;
    fiber.waits = Waits::kNothing;
    fiber.warp_phase = fiber.block_phase = 0;
  }
  // Run those of [begin, end) in `turns` that can.
  const auto run_some = [&](int begin, int end) {
    for (int i = begin; i < end && machine.error == nullptr; ++i) {
      const Fiber& fiber = machine.fibers[turns[i]];
      if (!fiber.done && fiber.waits == Waits::kNothing) run_until_it_waits(turns[i]);
    }
  };
  std::vector<int> warps((threads + kWarp - 1) / kWarp);
  for (int i = 0; i < static_cast<int>(warps.size()); ++i) warps[i] = i * kWarp;
  for (bool moved = true; moved && machine.error == nullptr;) {
    if (order == kByChance) {
      // One warp after the other as far as it comes, so that a fast one meets what slow ones have yet to read.
      std::shuffle(warps.begin(), warps.end(), machine.random);
      for (int begin : warps) {
        const int end = std::min(begin + kWarp, threads);
        do {
          std::shuffle(turns.begin() + begin, turns.begin() + end, machine.random);
          run_some(begin, end);
        } while (machine.error == nullptr && release(begin, end, Waits::kWarp));
      }
      moved = release(0, threads, Waits::kBlock);
    } else {
      run_some(0, threads);
      moved = release(0, threads, Waits::kBlock);
      for (int begin : warps) moved |= release(begin, std::min(begin + kWarp, threads), Waits::kWarp);
    }
  }
  if (machine.error != nullptr) return;
  for (int i = 0; i < threads; ++i) {
    if (!machine.fibers[i].done) machine.error = "threads of a block wait for each other in different places";
  }
}

// After a fault some fibers stand in the middle of a kernel; what they hold is lost.
inline void abandon_fibers() {
  for (Fiber& fiber : machine.fibers) fiber.begun = false;
}

// Run a kernel; returns null, or what went wrong. Shared memory starts as noise in every block; by chance, as on a GPU,
// as the block before left it.
inline const char* launch(
    int blocks, int threads, Order order, unsigned seed, void* shared, size_t shared_bytes, std::function<void()> kernel) {
  machine.kernel = std::move(kernel);
  machine.threads = threads;
  machine.error = nullptr;
  machine.random.seed(seed);
  gridDim.x = static_cast<unsigned>(blocks);
  blockDim.x = static_cast<unsigned>(threads);
  for (int i = 0; i < blocks && machine.error == nullptr; ++i) {
    blockIdx.x = static_cast<unsigned>(order == kBackward ? blocks - 1 - i : i);
    if (order != kByChance || machine.random() % 2) memset(shared, 0xcd, shared_bytes);
    run_block(order);
  }
  if (machine.error != nullptr) abandon_fibers();
  return machine.error;
}

// Each lane gets read(lane -> value of that lane).
template <typename T, typename Read>
inline auto exchange_in_warp(T value, Read read) {
  const int warp_begin = machine.current / kWarp * kWarp;
  Fiber& fiber = self();
  const int phase = fiber.warp_phase ^= 1;
  fiber.for_warp[phase] = 0;
  memcpy(&fiber.for_warp[phase], &value, sizeof(T));
  suspend(Waits::kWarp);
  return read([&](int lane) {
    T other;
    memcpy(&other, &machine.fibers[warp_begin + lane].for_warp[phase], sizeof(T));
    return other;
  });
}

}  // namespace cuda_on_cpu

inline void __syncthreads() { cuda_on_cpu::suspend(cuda_on_cpu::Waits::kBlock); }

inline int __syncthreads_or(int predicate) {
  auto& fiber = cuda_on_cpu::self();
  const int phase = fiber.block_phase ^= 1;
  fiber.for_block[phase] = predicate != 0;
  cuda_on_cpu::suspend(cuda_on_cpu::Waits::kBlock);
  for (int i = 0; i < cuda_on_cpu::machine.threads; ++i) {
    if (!cuda_on_cpu::machine.fibers[i].done && cuda_on_cpu::machine.fibers[i].for_block[phase]) return 1;
  }
  return 0;
}

template <typename T>
inline T __reduce_add_sync(unsigned, T value) {
  return cuda_on_cpu::exchange_in_warp(value, [](auto of_lane) {
    T sum = 0;
    for (int lane = 0; lane < 32; ++lane) sum += of_lane(lane);
    return sum;
  });
}

template <typename T>
inline T __shfl_up_sync(unsigned, T value, unsigned step) {
  const int lane = static_cast<int>(threadIdx.x % 32), source = lane - static_cast<int>(step);
  return cuda_on_cpu::exchange_in_warp(value, [=](auto of_lane) { return of_lane(source < 0 ? lane : source); });
}

template <typename T, typename U>
inline T atomicAdd(T* address, U value) {
  const T old = *address;
  *address += static_cast<T>(value);
  return old;
}

template <typename T, typename U>
inline T atomicOr(T* address, U value) {
  const T old = *address;
  *address |= static_cast<T>(value);
  return old;
}

template <typename T>
inline T atomicCAS(T* address, T expected, T value) {
  const T old = *address;
  if (old == expected) *address = value;
  return old;
}

template <typename T>
inline T __ldcs(const T* address) {
  return *address;
}

inline int __popc(unsigned bits) { return __builtin_popcount(bits); }
inline int __ffs(unsigned bits) { return __builtin_ffs(static_cast<int>(bits)); }
inline int __clz(int bits) { return bits == 0 ? 32 : __builtin_clz(static_cast<unsigned>(bits)); }
