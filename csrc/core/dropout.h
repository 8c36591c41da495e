// The dropout decision and arithmetic of one element, shared by both backends. Each operation is
// rounded on its own (no fused multiply-add), so that both give the same bits.
#pragma once

#include <cmath>
#include <cstdint>

#include "core/hd.h"
#include "core/philox.h"

namespace te {

struct DropoutRule {
  uint32_t threshold = 0;  // keep where the random word is at least this
  float scale = 1.0f;      // 1 / (1 - p)
};

// word >= ceil(p * 2^32) is exactly word / 2^32 >= p, and p < 1 keeps the threshold in 32 bits.
inline DropoutRule dropout_rule(float p) {
  constexpr double kWords = 4294967296.0;
  return {static_cast<uint32_t>(std::ceil(static_cast<double>(p) * kWords)),
          static_cast<float>(1.0 / (1.0 - static_cast<double>(p)))};
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
TE_HD float dropout(float value, uint32_t word, DropoutRule rule) {
  return word >= rule.threshold ? rounded_product(value, rule.scale) : 0.0f;
}

}  // namespace te
