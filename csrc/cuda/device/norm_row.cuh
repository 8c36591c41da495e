// What the norm kernels share: packed values and their conversion to fp32, sums over a row.
#pragma once

#include <cuda_fp16.h>

#include <type_traits>

#include "core/dtype.h"
#include "cuda/device/pack_io.cuh"
#include "cuda/device/reduce.cuh"
#include "cuda/device/vector.cuh"

namespace te::cuda {

// Two neighbouring 16-bit values as fp32. A bf16 value takes one instruction: its bits are the
// upper half of an fp32 value.
template <class T>
__device__ __forceinline__ float2 pair_of(uint32_t word) {
  if constexpr (std::is_same_v<T, BFloat16>) {
    return {__uint_as_float(word << 16), __uint_as_float(word & 0xffff0000u)};
  } else {
    static_assert(std::is_same_v<T, Half>);
    return __half22float2(*reinterpret_cast<const __half2*>(&word));
  }
}

// N neighbouring values in registers, as they lie in memory.
template <class T, int N>
struct Packed {
  static constexpr int kWords = N * static_cast<int>(sizeof(T)) / 4;
  static constexpr int kWide = kWords > 4 ? 4 : kWords;  // words of one access

  uint32_t words[kWords] = {};

  __device__ __forceinline__ void load(const void* from) {
#pragma unroll
    for (int first = 0; first < kWords; first += kWide) {
      const auto pack = load_pack<uint32_t, kWide>(static_cast<const uint32_t*>(from) + first);
#pragma unroll
      for (int i = 0; i < kWide; ++i) words[first + i] = pack.at[i];
    }
  }

  // The same from global memory, for pointers of which the compiler cannot tell where they point.
  __device__ __forceinline__ void load_global(const void* from) {
    using Bits = AccessOf<uint32_t, kWide>;
#pragma unroll
    for (int first = 0; first < kWords; first += kWide) {
      const Bits bits = __ldg(static_cast<const Bits*>(from) + first / kWide);
#pragma unroll
      for (int i = 0; i < kWide; ++i)
        words[first + i] = reinterpret_cast<const uint32_t*>(&bits)[i];
    }
  }

  // Loads if `wanted`, else keeps the old values. The load is predicated, because a branch would
  // cost moves between registers. kPastL1: the load allocates no line in the L1 cache, to leave it
  // to gamma and beta, which a persistent block reads for every row.
  template <bool kPastL1>
  __device__ __forceinline__ void load_where(const void* from, bool wanted) {
    static_assert(kWords == 4);
    const auto flag = static_cast<uint32_t>(wanted);
    if constexpr (kPastL1)
      asm volatile(
          "{\n"
          ".reg .pred wanted;\n"
          "setp.ne.u32 wanted, %5, 0;\n"
          "@wanted ld.global.nc.L1::no_allocate.v4.u32 {%0, %1, %2, %3}, [%4];\n"
          "}\n"
          : "+r"(words[0]), "+r"(words[1]), "+r"(words[2]), "+r"(words[3])
          : "l"(from), "r"(flag));
    else
      asm volatile(
          "{\n"
          ".reg .pred wanted;\n"
          "setp.ne.u32 wanted, %5, 0;\n"
          "@wanted ld.global.nc.v4.u32 {%0, %1, %2, %3}, [%4];\n"
          "}\n"
          : "+r"(words[0]), "+r"(words[1]), "+r"(words[2]), "+r"(words[3])
          : "l"(from), "r"(flag));
  }

  __device__ __forceinline__ void convert(float (&values)[N]) const {
#pragma unroll
    for (int i = 0; i < kWords; ++i) {
      if constexpr (std::is_same_v<T, float>) {
        values[i] = __uint_as_float(words[i]);
      } else {
        const float2 pair = pair_of<T>(words[i]);
        values[2 * i] = pair.x;
        values[2 * i + 1] = pair.y;
      }
    }
  }

  // Makes the compiler convert the values again, instead of keeping N fp32 values in registers
  // across a reduction.
  __device__ __forceinline__ void stay_packed() {
#pragma unroll
    for (int i = 0; i < kWords; ++i) asm volatile("" : "+r"(words[i]));
  }
};

template <class T, int N>
__device__ __forceinline__ void load_values(const void* from, float (&values)[N]) {
  Packed<T, N> packed;
  packed.load(from);
  packed.convert(values);
}

// Rounds the values to T and stores them in global memory.
template <class T, int N>
__device__ __forceinline__ void store_values(void* to, const float (&values)[N]) {
  constexpr int kWidth = N * sizeof(T) > 16 ? 16 / sizeof(T) : N;
#pragma unroll
  for (int first = 0; first < N; first += kWidth) {
    float part[kWidth];
#pragma unroll
    for (int k = 0; k < kWidth; ++k) part[k] = values[first + k];
    store_pack_global(static_cast<T*>(to) + first, narrow<T>(part));
  }
}

// Calls f(Tag<T>) for a dtype that is the same in the whole launch, so that no warp diverges.
template <class F>
__device__ __forceinline__ void with_dtype(DType dtype, F&& f) {
  if (dtype == DType::BFloat16)
    f(Tag<BFloat16>{});
  else if (dtype == DType::Float32)
    f(Tag<float>{});
  else
    f(Tag<Half>{});
}

template <int N, class Term>
__device__ __forceinline__ float sum_of(const float (&values)[N], Term&& term) {
  float sum = term(values[0]);
#pragma unroll
  for (int k = 1; k < N; ++k) sum += term(values[k]);
  return sum;
}

// Computes (x - mean) * rstd in one instruction, as x * rstd - mean * rstd. What this loses with a
// large mean is less than the rounding of 16-bit values; of fp32 values callers subtract the mean
// first.
struct Standardised {
  float rstd, shift;
  __device__ __forceinline__ Standardised(float mean, float scale)
      : rstd(scale), shift(-mean * scale) {}
  __device__ __forceinline__ float operator()(float x) const { return fmaf(x, rstd, shift); }
};

// Sums over the threads of one row: 8 or 16 lanes, a warp, or a whole block of warps (then all
// threads of the block call). Two sets of slots are used in turn, so that each sum needs one
// barrier only.
class RowSum {
 public:
  static constexpr int kQuads = 9;  // sums of four warps each; one more for zeros after 32 warps
  using Slots = float4[2][kQuads];

  __device__ __forceinline__ explicit RowSum(Slots& slots)
      : quads_(slots[0]),
        mine_(reinterpret_cast<float*>(slots[0]) + threadIdx.x / 32),
        warps_(static_cast<int>(blockDim.x) / 32) {
    if (warps_ <= 1) return;
    // The last quad may have fewer than four warps, so three zeros follow the sums. The barrier of
    // the first sum makes them visible.
    if (threadIdx.x < 6) {
      auto* turn = reinterpret_cast<float*>(slots[threadIdx.x / 3]);
      turn[warps_ + static_cast<int>(threadIdx.x) % 3] = 0.0f;
    }
  }

  __device__ __forceinline__ float operator()(float value) {
    if (warps_ == 0) return sum_of_lanes(value);
    value = warp_reduce(value, Sum{});
    if (warps_ == 1) return value;
    if (threadIdx.x % 32 == 0) mine_[turn_ * 4] = value;
    __syncthreads();
    value = 0.0f;
#pragma unroll 1
    for (int quad = 0; 4 * quad < warps_; ++quad) {
      const float4 part = quads_[turn_ + quad];
      value += (part.x + part.y) + (part.z + part.w);
    }
    turn_ ^= kQuads;
    return value;
  }

 private:
  // The shuffles include only the lanes of one row, because other rows of the warp may not exist.
  __device__ __forceinline__ static float sum_of_lanes(float value) {
    const unsigned lanes = blockDim.x, first = threadIdx.y * lanes % 32;
    const unsigned mask = ((1u << lanes) - 1) << first;
    if (lanes == 16) value += __shfl_xor_sync(mask, value, 8);
#pragma unroll
    for (int offset = 4; offset > 0; offset /= 2) value += __shfl_xor_sync(mask, value, offset);
    return value;
  }

  const float4* quads_;
  float* mine_;
  int warps_;
  int turn_ = 0;  // offset of the set in use, counted in quads
};

}  // namespace te::cuda
