// The dropout decision and arithmetic of one element, shared by both backends. Each operation is
// rounded on its own (no fused multiply-add), so that both give the same bits.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>

#include "core/hd.h"
#include "core/philox.h"

namespace te {

// Elements 8 * group ... 8 * group + 7 share one draw of four 32-bit words, 16 random bits for each
// element. With more bits per element, drawing would take longer than reading and writing memory.
inline constexpr int kElementsPerDraw = 8;

struct DropoutRule {
  uint32_t threshold = 0;  // keep where the random bits are at least this
  float scale = 1.0f;      // 1 / (1 - threshold / 2^16)
};

// p is rounded up to a multiple of 2^-16 below 1, and the scale is that of the rounded p, so that
// the expected value is the element.
inline DropoutRule dropout_rule(float p) {
  constexpr double kSteps = 65536.0;
  const double threshold = std::min(std::ceil(static_cast<double>(p) * kSteps), kSteps - 1.0);
  return {static_cast<uint32_t>(threshold), static_cast<float>(kSteps / (kSteps - threshold))};
}

// The 16 random bits of an element, 0 to 7, of a draw.
TE_HD uint32_t random_bits(const PhiloxWords& words, int element) {
  const uint32_t low = (element & 2) != 0 ? words.at[1] : words.at[0];
  const uint32_t high = (element & 2) != 0 ? words.at[3] : words.at[2];
  const uint32_t word = (element & 4) != 0 ? high : low;
  return (element & 1) != 0 ? word >> 16 : word & 0xffffu;
}

TE_HD float rounded_sum(float a, float b) {
#if defined(__CUDA_ARCH__)
  return __fadd_rn(a, b);
#else
  return a + b;
#endif
}

TE_HD float rounded_product(float a, float b) {
#if defined(__CUDA_ARCH__)
  return __fmul_rn(a, b);
#else
  return a * b;
#endif
}

// A dropped element is exactly zero, whatever it was.
TE_HD float dropout(float value, uint32_t bits, DropoutRule rule) {
  return bits >= rule.threshold ? rounded_product(value, rule.scale) : 0.0f;
}

}  // namespace te
