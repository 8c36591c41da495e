#include "inspect/schedule.h"

#include <gtest/gtest.h>

#include <algorithm>

namespace te::inspect {
namespace {

// The definition of a due iteration: in a closed interval, and a multiple of freq.
bool is_due(const Schedule& schedule, int64_t iteration) {
  bool inside = false;
  for (const auto& [start, end] : schedule.intervals)
    inside |= start <= iteration && iteration <= end;
  return inside && iteration % schedule.freq == 0;
}

TEST(Schedule, NextIsTheFirstDueIterationAfter) {
  const std::vector<std::vector<std::pair<int64_t, int64_t>>> lists = {
      {{0, Schedule::kNoEnd}},    {{3, 17}}, {{0, 0}}, {{1, 1}}, {{0, 20}, {80, 100}},
      {{5, 6}, {7, 7}, {11, 30}}, {}};
  for (const auto& intervals : lists) {
    for (const int64_t freq : {1, 2, 3, 7, 10, 1000}) {
      const Schedule schedule{.freq = freq, .intervals = intervals};
      for (int64_t i = -1; i < 120; ++i) {
        EXPECT_EQ(i >= 0 && schedule.due(i), i >= 0 && is_due(schedule, i));
        std::optional<int64_t> expected;
        for (int64_t j = i + 1; j <= 2000 && !expected; ++j) {
          if (is_due(schedule, j)) expected = j;
        }
        EXPECT_EQ(schedule.next(i), expected) << "freq " << freq << " after " << i;
      }
    }
  }
}

TEST(Schedule, DoesNotOverflow) {
  const Schedule always;
  EXPECT_EQ(always.next(Schedule::kNoEnd), std::nullopt);
  EXPECT_EQ(always.next(Schedule::kNoEnd - 1), Schedule::kNoEnd);
  const Schedule rare{.freq = Schedule::kNoEnd - 1, .intervals = {{0, Schedule::kNoEnd}}};
  EXPECT_EQ(rare.next(1), Schedule::kNoEnd - 1);
  EXPECT_EQ(rare.next(Schedule::kNoEnd - 1), std::nullopt);
}

}  // namespace
}  // namespace te::inspect
