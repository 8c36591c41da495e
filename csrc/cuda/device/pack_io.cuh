// Packs of values: their conversion to and from fp32, and accesses to global memory by one
// instruction each. (The compiler may split the assignment of a struct into its members, but not
// these accesses.)
#pragma once

#include <bit>

#include "core/dtype.h"
#include "cuda/device/vector.cuh"

namespace te::cuda {

template <class T, int N>
__device__ __forceinline__ void widen(const Pack<T, N>& pack, float (&values)[N]) {
#pragma unroll
  for (int k = 0; k < N; ++k) values[k] = static_cast<float>(pack.at[k]);
}

// Rounds to nearest even; neighbours share one conversion instruction where the chip has it.
template <class T, int N>
__device__ __forceinline__ Pack<T, N> narrow(const float (&values)[N]) {
  Pack<T, N> pack;
  constexpr bool kPaired = N % 2 == 0 && sizeof(T) == 2;
#pragma unroll
  for (int k = 0; k < N; k += kPaired ? 2 : 1) {
    if constexpr (kPaired && std::is_same_v<T, BFloat16>) {
      const __nv_bfloat162 pair = __floats2bfloat162_rn(values[k], values[k + 1]);
      pack.at[k].bits = __bfloat16_as_ushort(pair.x);
      pack.at[k + 1].bits = __bfloat16_as_ushort(pair.y);
    } else if constexpr (kPaired) {
      const __half2 pair = __floats2half2_rn(values[k], values[k + 1]);
      pack.at[k].bits = __half_as_ushort(pair.x);
      pack.at[k + 1].bits = __half_as_ushort(pair.y);
    } else {
      pack.at[k] = T(values[k]);
    }
  }
  return pack;
}

// The values as they would be read back from memory after a store in T.
template <class T>
__device__ __forceinline__ Octet<T> rounded_octet(const float (&values)[8]) {
  return std::bit_cast<Octet<T>>(narrow<T>(values));
}

// The built-in type for an access of kBytes bytes.
template <size_t kBytes>
struct Access;
template <>
struct Access<1> {
  using type = unsigned char;
};
template <>
struct Access<2> {
  using type = unsigned short;
};
template <>
struct Access<4> {
  using type = unsigned;
};
template <>
struct Access<8> {
  using type = uint2;
};
template <>
struct Access<16> {
  using type = uint4;
};
template <class T, int N>
using AccessOf = typename Access<sizeof(Pack<T, N>)>::type;

// A load that stays where it is in the code; the compiler would move a plain load to the first use
// of its result. (Cache hints that the bytes are not read again cost up to 5 % of a streaming
// kernel's time on an H200.)
__device__ __forceinline__ uint4 load_here(const uint4* from) {
  uint4 bits;
  asm volatile("ld.global.v4.u32 {%0, %1, %2, %3}, [%4];"
               : "=r"(bits.x), "=r"(bits.y), "=r"(bits.z), "=r"(bits.w)
               : "l"(__cvta_generic_to_global(from)));
  return bits;
}
template <class Bits>
__device__ __forceinline__ Bits load_here(const Bits* from) {
  return *from;
}
template <class T, int N>
__device__ __forceinline__ AccessOf<T, N> load_bits_here(const T* from) {
  return load_here(reinterpret_cast<const AccessOf<T, N>*>(from));
}
template <class T, int N>
__device__ __forceinline__ Pack<T, N> load_pack_here(const T* from) {
  const auto bits = load_bits_here<T, N>(from);
  return *reinterpret_cast<const Pack<T, N>*>(&bits);
}

// PTX rather than __stwb, which orders the store like a volatile one.
__device__ __forceinline__ void store_global(uint4* to, uint4 bits) {
  asm volatile("st.global.v4.u32 [%0], {%1, %2, %3, %4};" ::"l"(__cvta_generic_to_global(to)),
               "r"(bits.x), "r"(bits.y), "r"(bits.z), "r"(bits.w)
               : "memory");
}
__device__ __forceinline__ void store_global(uint2* to, uint2 bits) {
  asm volatile("st.global.v2.u32 [%0], {%1, %2};" ::"l"(__cvta_generic_to_global(to)), "r"(bits.x),
               "r"(bits.y)
               : "memory");
}
__device__ __forceinline__ void store_global(unsigned* to, unsigned bits) { *to = bits; }
__device__ __forceinline__ void store_global(unsigned short* to, unsigned short bits) {
  *to = bits;
}
__device__ __forceinline__ void store_global(unsigned char* to, unsigned char bits) { *to = bits; }

template <class T, int N>
__device__ __forceinline__ void store_pack_global(T* to, const Pack<T, N>& pack) {
  store_global(reinterpret_cast<AccessOf<T, N>*>(to),
               *reinterpret_cast<const AccessOf<T, N>*>(&pack));
}

// Makes the compiler convert the pack to fp32 again after this point. Otherwise it keeps the fp32
// values of the first use in twice the registers, and spills them.
template <class T, int N>
__device__ __forceinline__ void stay_packed(Pack<T, N>& pack) {
  if constexpr (sizeof(pack) % 4 == 0) {
    auto* words = reinterpret_cast<uint32_t*>(&pack);
#pragma unroll
    for (size_t i = 0; i < sizeof(pack) / 4; ++i) asm("" : "+r"(words[i]));
  }
}

}  // namespace te::cuda
