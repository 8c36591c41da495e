// The iterations in which a feature is due.
#pragma once

#include <cstdint>
#include <limits>
#include <optional>
#include <utility>
#include <vector>

namespace te::inspect {

struct Schedule {
  static constexpr int64_t kNoEnd = std::numeric_limits<int64_t>::max();

  int64_t freq = 1;
  std::vector<std::pair<int64_t, int64_t>> intervals = {
      {0, kNoEnd}};  // closed, in order, not overlapping

  bool due(int64_t iteration) const;                     // in an interval and iteration % freq == 0
  std::optional<int64_t> next(int64_t iteration) const;  // first due iteration > iteration

  bool operator==(const Schedule&) const = default;
};

}  // namespace te::inspect
