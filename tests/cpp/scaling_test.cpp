// Scales of delayed scaling for amaxes, or results of a recipe's own function, that give no scale.
#include "core/scaling.h"

#include <gtest/gtest.h>

#include <limits>

namespace te {
namespace {

constexpr float kInf = std::numeric_limits<float>::infinity();
constexpr float kNan = std::numeric_limits<float>::quiet_NaN();
constexpr float kLargest = std::numeric_limits<float>::max();

TEST(DelayedScale, KeepsTheOldScaleWithoutAnAmax) {
  for (const float amax : {0.0f, -1.0f, kInf, kNan})
    EXPECT_EQ(delayed_scale(amax, 3.0f, 448.0f, 1.0f), 3.0f) << amax;
}

TEST(DelayedScale, DividesByTheMarginAndStaysFinite) {
  EXPECT_EQ(delayed_scale(2.0f, 3.0f, 448.0f, 4.0f), 56.0f);
  EXPECT_EQ(delayed_scale(1e-40f, 3.0f, 448.0f, 1.0f), kLargest);
}

TEST(BoundedScale, KeepsTheOldScaleForNanAndStaysFinite) {
  EXPECT_EQ(bounded_scale(5.0f, 3.0f), 5.0f);
  EXPECT_EQ(bounded_scale(kNan, 3.0f), 3.0f);
  EXPECT_EQ(bounded_scale(kInf, 3.0f), kLargest);
}

}  // namespace
}  // namespace te
