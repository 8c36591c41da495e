// What the norm kernels share: packed values and their conversion to fp32, sums over a row.
#pragma once

#include <cuda_fp16.h>

#include <type_traits>

#include "core/dtype.h"
#include "cuda/device/reduce.cuh"
#include "cuda/device/vector.cuh"

namespace te::cuda {

// Two neighbours of 16 bits as fp32; bf16 costs one instruction each.
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

  // 16 bytes that are read once: past the L1 cache, which is for gamma and beta. Keeps what it
  // holds unless `wanted`; predicated, because a branch would cost moves.
  __device__ __forceinline__ void load_streaming(const void* from, bool wanted) {
    static_assert(kWords == 4);
    asm volatile(
        "{\n"
        ".reg .pred wanted;\n"
        "setp.ne.u32 wanted, %5, 0;\n"
        "@wanted ld.global.nc.L1::no_allocate.v4.u32 {%0, %1, %2, %3}, [%4];\n"
        "}\n"
        : "+r"(words[0]), "+r"(words[1]), "+r"(words[2]), "+r"(words[3])
        : "l"(from), "r"(static_cast<uint32_t>(wanted)));
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

  // Makes the compiler convert anew instead of keeping N fp32 values alive across a reduction.
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

template <class T, int N>
__device__ __forceinline__ void store_values(void* to, const float (&values)[N]) {
  constexpr int kWidth = N * sizeof(T) > 16 ? 16 / sizeof(T) : N;
#pragma unroll
  for (int first = 0; first < N; first += kWidth) {
    Pack<T, kWidth> pack;
#pragma unroll
    for (int k = 0; k < kWidth; ++k) pack.at[k] = T(values[first + k]);
    store_pack(static_cast<T*>(to) + first, pack);
  }
}

// f(Tag<T>) for a dtype that is the same in the whole launch: a uniform branch.
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
  float sum = 0.0f;
#pragma unroll
  for (int k = 0; k < N; ++k) sum += term(values[k]);
  return sum;
}

// Sums over the threads of one row: a warp, or a whole block of them (then all threads of the block
// call). Two sets of slots take turns, so that one barrier a sum is enough.
template <int kValues>
class RowSum {
 public:
  __device__ __forceinline__ void operator()(float (&values)[kValues]) {
#pragma unroll
    for (int i = 0; i < kValues; ++i) values[i] = warp_reduce(values[i], Sum{});
    const int warps = static_cast<int>(blockDim.x) / 32;
    if (warps == 1) return;
    __shared__ float slots[2][kValues][32];
    const int lane = static_cast<int>(threadIdx.x) % 32, warp = static_cast<int>(threadIdx.x) / 32;
#pragma unroll
    for (int i = 0; i < kValues; ++i)
      if (lane == 0) slots[turn_][i][warp] = values[i];
    __syncthreads();
#pragma unroll
    for (int i = 0; i < kValues; ++i)
      values[i] = warp_reduce(lane < warps ? slots[turn_][i][lane] : 0.0f, Sum{});
    turn_ ^= 1;
  }

 private:
  int turn_ = 0;
};

}  // namespace te::cuda
