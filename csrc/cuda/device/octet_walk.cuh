// How a grid that fills the chip once walks over a tensor, for reductions: a thread takes batches
// of octets, block by block, and what is left over element by element.
#pragma once

#include <algorithm>
#include <cstdint>

#include "cuda/device/vector.cuh"
#include "cuda/launch.h"
#include "ops/moments.h"

namespace te::cuda {

template <class In>
struct OctetWalk {
  // 48 KiB in flight on each multiprocessor, and 80 registers a thread.
  static constexpr int kThreads = 384;
  static constexpr int kWarps = kThreads / 32;
  static constexpr int kBlocksPerMultiprocessor = 2;
  static constexpr int kInFlight = 4 / Octet<In>::kWords;  // loaded before the first is used
  static_assert(kThreads >= kMomentsBlocks, "the last block reads a row per thread");

  int64_t count;   // of elements
  int64_t octets;  // that are read whole; 0 where memory is not aligned for it

  OctetWalk(int64_t elements, bool wide) : count(elements), octets(wide ? elements / 8 : 0) {}

  unsigned blocks(Device device) const {
    const int64_t most = int64_t{multiprocessors(device)} * kBlocksPerMultiprocessor;
    return static_cast<unsigned>(
        std::clamp<int64_t>(ceil_div(count, int64_t{8} * kThreads * kInFlight), 1,
                            std::min<int64_t>(most, kMomentsBlocks)));
  }

  // A thread's batches begin at first() + n * step().
  __device__ __forceinline__ int64_t first() const {
    return int64_t{blockIdx.x} * kThreads * kInFlight + threadIdx.x;
  }
  __device__ __forceinline__ int64_t step() const {
    return int64_t{gridDim.x} * kThreads * kInFlight;
  }
  // f(k, octet) for the octets of a batch that exist.
  template <int kOctets = kInFlight, class F>
  __device__ __forceinline__ void for_batch(int64_t batch, F&& f) const {
    const auto left = static_cast<int>(min(octets - batch, int64_t{kOctets * kThreads}));
    if (left > (kOctets - 1) * kThreads) {  // all but the last: without a branch between octets
#pragma unroll
      for (int k = 0; k < kOctets; ++k) f(k, batch + k * kThreads);
    } else {
#pragma unroll
      for (int k = 0; k < kOctets - 1; ++k)
        if (k * kThreads < left) f(k, batch + k * kThreads);
    }
  }

  __device__ __forceinline__ bool has_rest() const { return 8 * octets < count; }
  __device__ __forceinline__ int64_t first_of_rest() const {
    return 8 * octets + int64_t{blockIdx.x} * kThreads + threadIdx.x;
  }
  template <class F>
  __device__ __forceinline__ void for_rest(F&& f) const {
#pragma unroll 1
    for (int64_t i = first_of_rest(); i < count; i += int64_t{gridDim.x} * kThreads) f(i);
  }
};

}  // namespace te::cuda
