// Scale from amax: the arithmetic of current and delayed scaling, shared by both backends.
#pragma once

#include <type_traits>

#include "core/bits.h"
#include "core/float16.h"
#include "core/hd.h"

namespace te {

inline constexpr uint32_t kInfinityBits = 0x7f800000u;
inline constexpr uint32_t kLargestFiniteBits = 0x7f7fffffu;

TE_HD bool is_finite(float value) { return (float_bits(value) & kInfinityBits) != kInfinityBits; }

// The larger of two numbers. Ignores NaN in either argument, with the same result on host and
// device.
TE_HD float max_ignoring_nan(float a, float b) { return b > a || a != a ? b : a; }

// IEEE division on both backends, whatever the fast-math flags of the translation unit.
TE_HD float divide(float a, float b) {
#if defined(__CUDA_ARCH__)
  return __fdiv_rn(a, b);
#else
  return a / b;
#endif
}

TE_HD float floor_to_power_of_2(float value) { return bits_float(float_bits(value) & 0xff800000u); }

// Current scaling: scale = fp8_max / max(amax, epsilon); 1 if the denominator is 0, Inf or NaN;
// `largest` if the quotient overflows.
TE_HD float current_scale(float amax, float fp8_max, float epsilon, bool power_of_2,
                          float largest = bits_float(kLargestFiniteBits)) {
  const float bounded = amax < epsilon ? epsilon : amax;
  if (!is_finite(bounded) || bounded == 0.0f) return 1.0f;
  float scale = divide(fp8_max, bounded);
  if (!is_finite(scale)) scale = largest;
  return power_of_2 ? floor_to_power_of_2(scale) : scale;
}

// Block scaling of values of type In: the same, but a scale that overflows becomes the largest
// finite value of In.
template <class In>
TE_HD float block_scale(float amax, float fp8_max, float epsilon, bool power_of_2) {
  constexpr uint32_t kLargest = std::is_same_v<In, BFloat16> ? 0x7f7f0000u
                                : std::is_same_v<In, Half>   ? 0x477fe000u
                                                             : kLargestFiniteBits;
  return current_scale(amax, fp8_max, epsilon, power_of_2, bits_float(kLargest));
}

// Delayed scaling: scale = fp8_max / amax / 2^margin; the old scale if amax is 0, Inf or NaN.
TE_HD float delayed_scale(float amax, float old_scale, float fp8_max, float margin_factor) {
  if (!(amax > 0.0f) || !is_finite(amax)) return old_scale;
  const float scale = divide(divide(fp8_max, amax), margin_factor);
  return is_finite(scale) ? scale : bits_float(kLargestFiniteBits);
}

// The scale that a recipe's own function has computed: the old scale if it is NaN, the largest
// finite number if it is infinite.
TE_HD float bounded_scale(float scale, float old_scale) {
  if (scale != scale) return old_scale;
  return is_finite(scale) ? scale : bits_float(kLargestFiniteBits);
}

}  // namespace te
