// FP8 codecs: E4M3 (no infinity, NaN = 0x7f) and E5M2 (IEEE-like).
// Encoding rounds to nearest even and saturates to the largest finite value, infinities included;
// NaN stays NaN (code 0x7f with sign 0 for both formats). The integer arithmetic below defines the
// result. GPUs of compute capability 8.9 and newer use their conversion instruction instead, which
// gives the same codes (tests/cpp/float8_test.cpp compares them).
#pragma once

#include <cstdint>

#include "core/bits.h"
#include "core/hd.h"

#if defined(__CUDACC__)
#include <cuda_fp8.h>
#endif

namespace te {

// Returns the FP8 code of |x|, given as fp32 bits, rounded to nearest even. For a normal result,
// half the value of the last kept bit (minus one if that bit is 0, so that a tie rounds to even) is
// added to the bits, the bias of the exponent is changed, and the extra bits are shifted out.
template <int kMantissaBits, int kMinExponent>
TE_HD uint32_t round_magnitude(uint32_t magnitude) {
  constexpr int kDropped = 23 - kMantissaBits;
  constexpr uint32_t kSmallestNormal = static_cast<uint32_t>(127 + kMinExponent) << 23;
  if (magnitude < kSmallestNormal) {
    // Subnormal result: the ulp of `anchor` is the format's smallest step, so the fp32 addition
    // rounds |x| to a multiple of it, whose number is then in the low bits of the sum.
    constexpr uint32_t kAnchor = static_cast<uint32_t>(127 + kMinExponent + kDropped) << 23;
    return float_bits(bits_float(magnitude) + bits_float(kAnchor)) - kAnchor;
  }
  const uint32_t rounded =
      magnitude + ((1u << (kDropped - 1)) - 1u) + ((magnitude >> kDropped) & 1u);
  return (rounded - kSmallestNormal + (1u << 23)) >> kDropped;
}

struct E4M3 {
  static constexpr float kMax = 448.0f;
  static constexpr uint8_t kMaxCode = 0x7e;
  static constexpr uint8_t kNaN = 0x7f;

  TE_HD static uint8_t encode(float value) {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 890
    const uint8_t code = __nv_cvt_float_to_fp8(value, __NV_SATFINITE, __NV_E4M3);
    return value != value ? kNaN : code;
#else
    const uint32_t u = float_bits(value);
    const uint32_t magnitude = u & 0x7fffffffu;
    if (magnitude > 0x7f800000u) return kNaN;
    const uint8_t sign = static_cast<uint8_t>((u >> 24) & 0x80u);
    if (magnitude >= 0x43e00000u) return sign | kMaxCode;  // |x| >= 448
    return sign | static_cast<uint8_t>(round_magnitude<3, -6>(magnitude));
#endif
  }
  TE_HD static float decode(uint8_t code) {
    const uint32_t exponent = (code >> 3) & 0xfu;
    const uint32_t mantissa = code & 0x7u;
    const uint32_t sign = static_cast<uint32_t>(code & 0x80u) << 24;
    if ((code & 0x7fu) == kNaN) return bits_float(0x7fc00000u);
    if (exponent == 0) {
      const float magnitude = static_cast<float>(mantissa) * 0.001953125f;  // 2^-9
      return sign ? -magnitude : magnitude;
    }
    return bits_float(sign | ((exponent + 120u) << 23) | (mantissa << 20));
  }
};

struct E5M2 {
  static constexpr float kMax = 57344.0f;
  static constexpr uint8_t kMaxCode = 0x7b;
  static constexpr uint8_t kNaN = 0x7f;

  TE_HD static uint8_t encode(float value) {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 890
    const uint8_t code = __nv_cvt_float_to_fp8(value, __NV_SATFINITE, __NV_E5M2);
    return value != value ? kNaN : code;
#else
    const uint32_t u = float_bits(value);
    const uint32_t magnitude = u & 0x7fffffffu;
    if (magnitude > 0x7f800000u) return kNaN;
    const uint8_t sign = static_cast<uint8_t>((u >> 24) & 0x80u);
    if (magnitude >= 0x47600000u) return sign | kMaxCode;  // |x| >= 57344
    return sign | static_cast<uint8_t>(round_magnitude<2, -14>(magnitude));
#endif
  }
  TE_HD static float decode(uint8_t code) {
    const uint32_t exponent = (code >> 2) & 0x1fu;
    const uint32_t mantissa = code & 0x3u;
    const uint32_t sign = static_cast<uint32_t>(code & 0x80u) << 24;
    if (exponent == 0x1fu) return bits_float(mantissa ? 0x7fc00000u : (sign | 0x7f800000u));
    if (exponent == 0) {
      const float magnitude = static_cast<float>(mantissa) * 1.52587890625e-5f;  // 2^-16
      return sign ? -magnitude : magnitude;
    }
    return bits_float(sign | ((exponent + 112u) << 23) | (mantissa << 21));
  }
};

}  // namespace te
