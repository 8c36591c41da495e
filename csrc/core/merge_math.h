// The arithmetic of merging attention over two sets of keys, shared by both backends.
#pragma once

#include <cmath>
#include <limits>

#include "core/dropout.h"
#include "core/hd.h"

namespace te {

// The part's share of the softmax over the keys of both; 0 where the part has no key.
TE_HD float share_of_part(float log_sum_exp, float of_part) {
  constexpr float kNoKey = -std::numeric_limits<float>::infinity();
  return of_part == kNoKey ? 0.0f : 1.0f / (1.0f + std::exp(log_sum_exp - of_part));
}

// log(exp(a) + exp(b)); -Inf where both are.
TE_HD float log_of_sum(float a, float b) {
  const float apart = a == b ? 0.0f : std::fabs(a - b);  // equal infinities have no difference
  return (a > b ? a : b) + std::log1p(std::exp(-apart));
}

// torch.lerp(value, part, share): a step from the nearer end, so that both ends are exact. Share 1
// takes nothing of `value`, whatever it is; share 0 is the caller's, who leaves the row as it is.
TE_HD float merged(float value, float part, float share) {
  const bool from_part = share >= 0.5f;
  const float step = from_part ? share - 1.0f : share;
  const float sum = (from_part ? part : value) + rounded_product(step, part - value);
  return share == 1.0f ? part : sum;
}

}  // namespace te
