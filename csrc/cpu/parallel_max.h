// The maximum of non-negative values, computed by several threads; NaN is ignored.
#pragma once

#include <cstdint>
#include <mutex>

#include "core/parallel.h"
#include "core/scaling.h"

namespace te::cpu {

// part(first, last) returns the maximum of a range, which is 0 if the range has no numbers.
template <class Part>
float parallel_max(int64_t count, int64_t grain, Part&& part) {
  float result = 0.0f;
  std::mutex mutex;
  parallel_for(count, grain, [&](int64_t first, int64_t last) {
    const float value = part(first, last);
    const std::lock_guard lock(mutex);
    result = max_ignoring_nan(result, value);
  });
  return result;
}

}  // namespace te::cpu
