// Packed FP8 conversions, several values at a time; one instruction per pair.
//
// The codes are those of E4M3::encode and E5M2::encode (core/float8.h), which run on GPUs that lack
// the instruction (before compute capability 8.9). The instruction rounds to nearest even and
// saturates, infinities included; NaN becomes 0x7f (and is positive after any arithmetic, such as
// the multiplication by a scale). The first value is the lowest byte, which a little-endian store
// puts first in memory.
#pragma once

#include <cuda_fp8.h>

#include <type_traits>

#include "core/float8.h"
#include "cuda/device/architecture.cuh"

namespace te::cuda {

template <class Fp8>
inline constexpr __nv_fp8_interpretation_t kInterpretation =
    std::is_same_v<Fp8, E4M3> ? __NV_E4M3 : __NV_E5M2;

// One asm statement, so that the second conversion can write into the other half of the register
// that holds the first result.
template <class Fp8>
__device__ __forceinline__ uint32_t encode4(float a, float b, float c, float d) {
  uint32_t codes = 0;
  if constexpr (!kHasFp8Conversion)
    codes = static_cast<uint32_t>(Fp8::encode(a)) | static_cast<uint32_t>(Fp8::encode(b)) << 8 |
            static_cast<uint32_t>(Fp8::encode(c)) << 16 |
            static_cast<uint32_t>(Fp8::encode(d)) << 24;
  else if constexpr (std::is_same_v<Fp8, E4M3>)
    asm("{\n.reg .b16 low, high;\n"
        "cvt.rn.satfinite.e4m3x2.f32 low, %2, %1;\n"
        "cvt.rn.satfinite.e4m3x2.f32 high, %4, %3;\n"
        "mov.b32 %0, {low, high};\n}"
        : "=r"(codes)
        : "f"(a), "f"(b), "f"(c), "f"(d));
  else
    asm("{\n.reg .b16 low, high;\n"
        "cvt.rn.satfinite.e5m2x2.f32 low, %2, %1;\n"
        "cvt.rn.satfinite.e5m2x2.f32 high, %4, %3;\n"
        "mov.b32 %0, {low, high};\n}"
        : "=r"(codes)
        : "f"(a), "f"(b), "f"(c), "f"(d));
  return codes;
}

// Codes of value[0..7] * scale.
template <class Fp8>
__device__ __forceinline__ uint2 encode8(const float (&value)[8], float scale) {
  return {encode4<Fp8>(value[0] * scale, value[1] * scale, value[2] * scale, value[3] * scale),
          encode4<Fp8>(value[4] * scale, value[5] * scale, value[6] * scale, value[7] * scale)};
}

__device__ __forceinline__ uint2 encode8(const float (&value)[8], float scale, bool e5m2) {
  return e5m2 ? encode8<E5M2>(value, scale) : encode8<E4M3>(value, scale);
}

// Decodes two codes by way of fp16. This is exact: each value of both formats is a value of fp16.
template <class Fp8>
__device__ __forceinline__ float2 decode2(uint32_t codes) {
  const auto pair = static_cast<__nv_fp8x2_storage_t>(codes);
  return __half22float2(__half2(__nv_cvt_fp8x2_to_halfraw2(pair, kInterpretation<Fp8>)));
}

}  // namespace te::cuda
