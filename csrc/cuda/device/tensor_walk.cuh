// How the grid of a reduction, which fills the GPU once, walks over a tensor. A thread reads
// batches of packs by wide loads, and the elements that belong to no pack one by one.
//
// A sweep is one batch of each thread. The sweeps go from the end of the tensor, which the kernel
// that has written it may have left in the L2 cache, to its start. Before them come the packs at
// the very end that do not fill a sweep (the remainder); they are divided evenly among the blocks.
// All lanes of a warp are active wherever packs are read.
#pragma once

#include <algorithm>
#include <cstdint>

#include "cuda/device/vector.cuh"
#include "cuda/launch.h"
#include "ops/moments.h"

namespace te::cuda {

// Two blocks share a multiprocessor; with 384 threads each they have 48 KiB of loads in flight, and
// 80 registers per thread.
template <int kElements, int kBatchOfThread, int kThreadsOfBlock>
struct TensorWalk {
  static constexpr int kThreads = kThreadsOfBlock;
  static constexpr int kWarps = kThreads / 32;
  static constexpr int kBlocksPerMultiprocessor = 2;
  static constexpr int kInFlight = kBatchOfThread;  // packs loaded before the first is used

  int64_t count;  // elements of the tensor
  int64_t packs;  // packs that are read whole; 0 if memory is not aligned for it
  int64_t sweep;  // packs of a whole sweep of the grid
  unsigned blocks;
  int sweeps;     // number of whole sweeps
  int remainder;  // packs after them
  int share;      // packs of the remainder for each block

  TensorWalk(int64_t elements, bool wide, Device device)
      : count(elements), packs(wide ? elements / (32 * kElements) * 32 : 0) {
    const int64_t most = std::min<int64_t>(
        int64_t{multiprocessors(device)} * kBlocksPerMultiprocessor, kMomentsBlocks);
    constexpr int kBatch = kThreads * kInFlight;
    blocks =
        static_cast<unsigned>(std::clamp<int64_t>(ceil_div(count, kElements * kBatch), 1, most));
    sweep = int64_t{blocks} * kBatch;
    sweeps = static_cast<int>(packs / sweep);
    remainder = static_cast<int>(packs % sweep);
    share = static_cast<int>(32 * ceil_div(remainder, 32 * int64_t{blocks}));
  }

  // Calls f(k, pack) for the batch that this thread takes in a sweep; the first has number 0.
  template <class F>
  __device__ __forceinline__ void for_sweep(int number, F&& f) const {
    const int64_t first = (sweeps - 1 - number) * sweep +
                          static_cast<int>(blockIdx.x) * (kThreads * kInFlight) +
                          static_cast<int>(threadIdx.x);
#pragma unroll
    for (int k = 0; k < kInFlight; ++k) f(k, first + k * kThreads);
  }
  // The same for this thread's packs of the remainder.
  template <class F>
  __device__ __forceinline__ void for_remainder(F&& f) const {
    const int first = static_cast<int>(blockIdx.x) * share, thread = static_cast<int>(threadIdx.x);
    const int left = min(share, remainder - first) - thread;
#pragma unroll
    for (int k = 0; k < kInFlight; ++k)
      if (k * kThreads < left) f(k, sweeps * sweep + first + thread + k * kThreads);
  }
  // Calls load(pack, slot), and later use(slot, k, pack), for all packs of this thread. While a
  // batch is used, the next one is being loaded. begin() is called once, when the first loads are
  // issued, and end() after each batch.
  template <class Slot, class Load, class Begin, class Use, class End>
  __device__ __forceinline__ void stream(Load&& load, Begin&& begin, Use&& use, End&& end) const {
    Slot even[kInFlight], odd[kInFlight];
    const auto load_sweep = [&](int number, Slot(&batch)[kInFlight]) {
      if (number < sweeps) for_sweep(number, [&](int k, int64_t pack) { load(pack, batch[k]); });
    };
    for_remainder([&](int k, int64_t pack) { load(pack, odd[k]); });
    load_sweep(0, even);
    begin();
    for_remainder([&](int k, int64_t pack) { use(odd[k], k, pack); });
    end();
    int number = 0;
    const auto step = [&](const Slot(&batch)[kInFlight], Slot(&next)[kInFlight]) {
      load_sweep(number + 1, next);
      for_sweep(number++, [&](int k, int64_t pack) { use(batch[k], k, pack); });
      end();
    };
    while (number < sweeps) {
      step(even, odd);
      if (number < sweeps) step(odd, even);
    }
  }
  // Calls f(pack) for the same packs, one after the other: for code that is large and rarely runs.
  template <class F>
  __device__ __forceinline__ void for_each(F&& f) const {
    const int block = static_cast<int>(blockIdx.x), thread = static_cast<int>(threadIdx.x);
#pragma unroll 1
    for (int number = 0; number <= sweeps; ++number) {
      const int batch = number < sweeps ? kThreads * kInFlight : share;
      const int end = number < sweeps ? batch : min(share, remainder - block * share);
#pragma unroll 1
      for (int i = thread; i < end; i += kThreads) f(number * sweep + int64_t{block} * batch + i);
    }
  }

  // The index of an element that this thread reads; `count` or more if there is none.
  __device__ __forceinline__ int64_t first_element() const {
    int64_t first = first_of_rest();
    const auto take = [&](int k, int64_t pack) {
      if (k == 0) first = kElements * pack;
    };
    if (sweeps > 0)
      for_sweep(0, take);
    else
      for_remainder(take);
    return first;
  }
  // Whether the calling warp has elements that belong to no pack.
  __device__ __forceinline__ bool has_rest() const {
    return first_of_rest() - static_cast<int>(threadIdx.x) % 32 < count;
  }
  __device__ __forceinline__ int64_t first_of_rest() const {
    return kElements * packs + int64_t{blockIdx.x} * kThreads + threadIdx.x;
  }
  template <class F>
  __device__ __forceinline__ void for_rest(F&& f) const {
#pragma unroll 1
    for (int64_t i = first_of_rest(); i < count; i += int64_t{gridDim.x} * kThreads) f(i);
  }
};

// A walk over octets of values, with 64 bytes of each thread in flight.
template <class In, int kThreads>
using OctetWalk = TensorWalk<8, 4 / Octet<In>::kWords, kThreads>;

}  // namespace te::cuda
