// Half and BFloat16 storage types with conversions from and to float (round to nearest even).
// Host and device code share them; on the device the conversions compile to single instructions.
#pragma once

#include <cstdint>

#include "core/bits.h"
#include "core/hd.h"

#if defined(__CUDACC__)
#include <cuda_bf16.h>
#include <cuda_fp16.h>
#endif

namespace te {

struct BFloat16 {
  uint16_t bits;

  BFloat16() = default;
  TE_HD explicit BFloat16(float value) {
#if defined(__CUDA_ARCH__)
    bits = __bfloat16_as_ushort(__float2bfloat16_rn(value));
#else
    const uint32_t u = float_bits(value);
    const bool nan = (u & 0x7fffffffu) > 0x7f800000u;
    bits = nan ? 0x7fffu : static_cast<uint16_t>((u + 0x7fffu + ((u >> 16) & 1u)) >> 16);
#endif
  }
  TE_HD explicit operator float() const { return bits_float(static_cast<uint32_t>(bits) << 16); }
};

struct Half {
  uint16_t bits;

  Half() = default;
  TE_HD explicit Half(float value) {
#if defined(__CUDA_ARCH__)
    bits = __half_as_ushort(__float2half_rn(value));
#else
    bits = encode(value);
#endif
  }
  TE_HD explicit operator float() const {
#if defined(__CUDA_ARCH__)
    return __half2float(__ushort_as_half(bits));
#else
    return decode(bits);
#endif
  }

 private:
  static uint16_t encode(float value) {
    const uint32_t u = float_bits(value);
    const uint16_t sign = static_cast<uint16_t>((u >> 16) & 0x8000u);
    const uint32_t magnitude = u & 0x7fffffffu;
    if (magnitude > 0x7f800000u) return 0x7fffu;          // NaN
    if (magnitude >= 0x477ff000u) return sign | 0x7c00u;  // rounds to infinity
    if (magnitude < 0x38800000u) {                        // subnormal result: let fp32 round
      const float scaled = bits_float(magnitude) + 0.5f;  // ulp of 0.5f is 2^-24
      return sign | static_cast<uint16_t>(float_bits(scaled) - float_bits(0.5f));
    }
    const uint32_t rounded = magnitude + 0xfffu + ((magnitude >> 13) & 1u);
    return sign | static_cast<uint16_t>((rounded - 0x38000000u) >> 13);
  }
  static float decode(uint16_t h) {
    const uint32_t sign = static_cast<uint32_t>(h & 0x8000u) << 16;
    const uint32_t exponent = (h >> 10) & 0x1fu;
    const uint32_t mantissa = h & 0x3ffu;
    if (exponent == 0x1fu) return bits_float(sign | 0x7f800000u | (mantissa << 13));
    if (exponent == 0) {
      const float magnitude = static_cast<float>(mantissa) * 5.9604644775390625e-8f;  // 2^-24
      return sign ? -magnitude : magnitude;
    }
    return bits_float(sign | ((exponent + 112u) << 23) | (mantissa << 13));
  }
};

}  // namespace te
