// The largest magnitudes of packed values, without unpacking them. The maximum of NaN and a number
// is the number.
#pragma once

#include "cuda/device/vector.cuh"

namespace te::cuda {

// Clears the signs in a word, which is one fp32 value or two neighbouring 16-bit values.
template <class T>
__device__ __forceinline__ uint32_t magnitude_word(uint32_t word) {
  return word & (sizeof(T) == 4 ? 0x7fffffffu : 0x7fff7fffu);
}

template <class T>
__device__ __forceinline__ uint32_t max_word(uint32_t a, uint32_t b) {
  if constexpr (sizeof(T) == 4)
    return __float_as_uint(fmaxf(__uint_as_float(a), __uint_as_float(b)));
  uint32_t result;
  if constexpr (std::is_same_v<T, BFloat16>)
    asm("max.bf16x2 %0, %1, %2;" : "=r"(result) : "r"(a), "r"(b));
  else
    asm("max.f16x2 %0, %1, %2;" : "=r"(result) : "r"(a), "r"(b));
  return result;
}

// The magnitudes of eight neighbouring values, packed in words.
template <class T>
struct OctetMagnitudes {
  static constexpr int kWords = 2 * static_cast<int>(sizeof(T));
  uint32_t word[kWords];

  __device__ __forceinline__ void raise(const uint32_t (&other)[kWords]) {
#pragma unroll
    for (int i = 0; i < kWords; ++i) word[i] = max_word<T>(word[i], other[i]);
  }
  __device__ __forceinline__ void raise(const OctetMagnitudes& other) { raise(other.word); }

  // The largest of the eight; 0 where all are NaN.
  __device__ __forceinline__ float largest() const {
    uint32_t found = word[0];
#pragma unroll
    for (int i = 1; i < kWords; ++i) found = max_word<T>(found, word[i]);
    if constexpr (sizeof(T) == 4) {
      return fmaxf(0.0f, __uint_as_float(found));
    } else {
      T low, high;
      low.bits = static_cast<uint16_t>(found);
      high.bits = static_cast<uint16_t>(found >> 16);
      return fmaxf(0.0f, fmaxf(static_cast<float>(low), static_cast<float>(high)));
    }
  }
};

template <class T>
__device__ __forceinline__ OctetMagnitudes<T> magnitudes_of(const Octet<T>& octet) {
  OctetMagnitudes<T> result;
#pragma unroll
  for (int i = 0; i < OctetMagnitudes<T>::kWords; ++i)
    result.word[i] = magnitude_word<T>(octet.word(i));
  return result;
}

}  // namespace te::cuda
