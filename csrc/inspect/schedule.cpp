#include "inspect/schedule.h"

#include <algorithm>

namespace te::inspect {

bool Schedule::due(int64_t iteration) const {
  return iteration % freq == 0 && std::ranges::any_of(intervals, [&](const auto& interval) {
           return interval.first <= iteration && iteration <= interval.second;
         });
}

std::optional<int64_t> Schedule::next(int64_t iteration) const {
  if (iteration == kNoEnd) return std::nullopt;
  for (const auto& [start, end] : intervals) {
    const int64_t from = std::max(iteration + 1, start);
    const int64_t missing = (freq - from % freq) % freq;  // iterations and freq are not negative
    if (from <= end && missing <= end - from) return from + missing;
  }
  return std::nullopt;
}

}  // namespace te::inspect
