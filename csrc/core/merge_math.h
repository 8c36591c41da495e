// The arithmetic of merging attention over sets of keys, shared by both backends.
#pragma once

#include <cmath>
#include <limits>

#include "core/hd.h"

namespace te {

inline constexpr float kNoKey = -std::numeric_limits<float>::infinity();

// The one log-sum-exp that says that there is no key; attention backends write either infinity.
TE_HD float with_no_key(float log_sum_exp) {
  return std::isinf(log_sum_exp) ? kNoKey : log_sum_exp;
}

// Makes weights of log-sum-exps: the share that each set of keys has in the softmax over all of
// them, 0 for a set without keys (either infinity), and exactly 1 where no other set has any.
// Returns the log-sum-exp of all, +inf where there is no key.
template <int n>
TE_HD float shares_of(float (&sums)[n]) {
  float most = kNoKey, merged = kNoKey;
  int with_keys = 0;
  for (int k = 0; k < n; ++k) {
    sums[k] = with_no_key(sums[k]);
    const bool has_keys = sums[k] != kNoKey;
    with_keys += has_keys ? 1 : 0;
    merged = has_keys ? sums[k] : merged;
    most = sums[k] > most ? sums[k] : most;
  }
  if (with_keys <= 1) {
    for (int k = 0; k < n; ++k) sums[k] = sums[k] == kNoKey ? 0.0f : 1.0f;
    return merged == kNoKey ? -kNoKey : merged;
  }
  float total = 0.0f;
  for (int k = 0; k < n; ++k) {
    sums[k] = std::exp(sums[k] - most);
    total += sums[k];
  }
  const float inverse = 1.0f / total;
  // A set without keys stays out where another one has NaN.
  for (int k = 0; k < n; ++k) sums[k] = sums[k] == 0.0f ? 0.0f : sums[k] * inverse;
  return most + std::log(total);
}

}  // namespace te
