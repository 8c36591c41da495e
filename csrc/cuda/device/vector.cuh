// Wide loads and stores: N elements of T as one access of up to 16 bytes.
#pragma once

#include <cstdint>
#include <type_traits>

#include "core/float16.h"

namespace te::cuda {

// An aligned pack of N values; `pack = *pointer` compiles to one load.
template <class T, int N>
struct alignas(sizeof(T) * N) Pack {
  T at[N];
};

template <class T, int N>
__device__ __forceinline__ Pack<T, N> load_pack(const T* from) {
  return *reinterpret_cast<const Pack<T, N>*>(from);
}

template <class T, int N>
__device__ __forceinline__ void store_pack(T* to, const Pack<T, N>& pack) {
  *reinterpret_cast<Pack<T, N>*>(to) = pack;
}

// Eight neighbouring values as they came from memory. They stay packed until they are used, so that
// many loads can be in flight.
template <class T>
struct Octet {
  static constexpr int kWords = sizeof(T) / 2;
  uint4 words[kWords];

  __device__ __forceinline__ float operator[](int i) const {
    if constexpr (sizeof(T) == 4) {
      return __uint_as_float(word(i));
    } else if constexpr (std::is_same_v<T, BFloat16>) {
      return __uint_as_float(i % 2 == 0 ? word(i / 2) << 16 : word(i / 2) & 0xffff0000u);
    } else {
      T value;
      value.bits = static_cast<uint16_t>(word(i / 2) >> (i % 2 * 16));
      return static_cast<float>(value);
    }
  }
  __device__ __forceinline__ uint32_t word(int i) const {
    const uint4& four = words[i / 4];
    return i % 4 == 0 ? four.x : i % 4 == 1 ? four.y : i % 4 == 2 ? four.z : four.w;
  }
};

// `from` is aligned to 16 bytes. The load has no hint to evict the lines early: that costs up to 5
// % of a streaming kernel's time on an H200.
template <class T>
__device__ __forceinline__ Octet<T> load_octet(const T* from) {
  const auto* words = reinterpret_cast<const uint4*>(from);
  Octet<T> octet;
#pragma unroll
  for (int i = 0; i < Octet<T>::kWords; ++i) octet.words[i] = __ldg(words + i);
  return octet;
}

// Eight values from anywhere: value i is from[min(i, last)].
template <class T>
__device__ __forceinline__ Octet<T> gather_octet(const T* from, int last) {
  union {
    Octet<T> octet;
    T values[8];
  };
#pragma unroll
  for (int i = 0; i < 8; ++i) values[i] = from[min(i, last)];
  return octet;
}

// Rounds eight values and stores them; `to` is aligned to 16 bytes.
template <class T>
__device__ __forceinline__ void store_octet(T* to, const float (&values)[8]) {
  if constexpr (sizeof(T) == 4) {
    store_pack(to, Pack<float, 4>{values[0], values[1], values[2], values[3]});
    store_pack(to + 4, Pack<float, 4>{values[4], values[5], values[6], values[7]});
  } else {
    uint32_t word[4];
#pragma unroll
    for (int i = 0; i < 4; ++i)
      word[i] = T(values[2 * i]).bits | uint32_t{T(values[2 * i + 1]).bits} << 16;
    // From the same in C++ the compiler makes four stores.
    asm volatile("st.global.v4.b32 [%0], {%1, %2, %3, %4};" ::"l"(__cvta_generic_to_global(to)),
                 "r"(word[0]), "r"(word[1]), "r"(word[2]), "r"(word[3])
                 : "memory");
  }
}

}  // namespace te::cuda
