// The arithmetic of merging attention over sets of keys, shared by both backends.
#pragma once

#include <cmath>
#include <limits>

#include "core/hd.h"

namespace te {

inline constexpr float kNoKey = -std::numeric_limits<float>::infinity();

// Turns +inf into -inf. Attention backends write either infinity for a query that sees no key.
TE_HD float with_no_key(float log_sum_exp) {
  return std::isinf(log_sum_exp) ? kNoKey : log_sum_exp;
}

// Replaces the log-sum-exp of each set of keys by its weight: the share of the set in the softmax
// over all sets. The weight is 0 for a set without keys (a log-sum-exp of either infinity), and
// exactly 1 for the only set with keys. Returns the log-sum-exp over all sets, or +inf if no set
// has a key.
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
  // A set without keys keeps the weight 0 even if `inverse` is NaN because of another set.
  for (int k = 0; k < n; ++k) sums[k] = sums[k] == 0.0f ? 0.0f : sums[k] * inverse;
  return most + std::log(total);
}

}  // namespace te
