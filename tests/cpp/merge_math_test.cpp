// The shares and sums of merged rows of attention against doubles, and at their ends.
#include "core/merge_math.h"

#include <gtest/gtest.h>

namespace te {
namespace {

constexpr float kInfinity = std::numeric_limits<float>::infinity();

TEST(ShareOfPart, IsThatOfTheExactExponentials) {
  for (float apart = -80.0f; apart < 80.0f; apart += 0.37f) {
    const double exact = 1.0 / (1.0 + std::exp(-double{apart}));
    EXPECT_NEAR(share_of_part(0.0f, apart), exact, exact * 4e-7) << apart;
  }
}

TEST(ShareOfPart, IsNothingOrAllWhereOnlyOneHasKeys) {
  EXPECT_EQ(share_of_part(-kInfinity, 3.0f), 1.0f);
  for (const float sum : {3.0f, kInfinity, -kInfinity, std::nanf("")})
    EXPECT_EQ(share_of_part(sum, -kInfinity), 0.0f) << sum;
}

TEST(LogOfSum, IsThatOfTheExactExponentials) {
  for (float a = -90.0f; a < 90.0f; a += 0.73f) {
    for (float b = a - 30.0f; b < a + 30.0f; b += 0.91f) {
      const double larger = std::fmax(a, b);
      const double exact =
          larger + std::log(std::exp(double{a} - larger) + std::exp(double{b} - larger));
      EXPECT_NEAR(log_of_sum(a, b), exact, std::fabs(exact) * 1e-7 + 2e-7) << a << ' ' << b;
    }
  }
}

TEST(LogOfSum, OfInfinitiesIsNoNan) {
  EXPECT_EQ(log_of_sum(-kInfinity, -kInfinity), -kInfinity);
  EXPECT_EQ(log_of_sum(kInfinity, kInfinity), kInfinity);
  EXPECT_EQ(log_of_sum(-kInfinity, kInfinity), kInfinity);
  EXPECT_EQ(log_of_sum(-kInfinity, 0.3f), 0.3f);
  EXPECT_EQ(log_of_sum(0.3f, -kInfinity), 0.3f);
}

TEST(LogOfSum, KeepsNan) {
  for (const float other : {1.0f, kInfinity, -kInfinity}) {
    EXPECT_TRUE(std::isnan(log_of_sum(std::nanf(""), other))) << other;
    EXPECT_TRUE(std::isnan(log_of_sum(other, std::nanf("")))) << other;
  }
}

TEST(Merged, StepsFromTheNearerEnd) {
  EXPECT_EQ(merged(1.0f, 4.0f, 0.5f), 2.5f);
  EXPECT_EQ(merged(1.0f, 1e9f, 0x1p-30f), 1.0f + 0x1p-30f * (1e9f - 1.0f));
  EXPECT_EQ(merged(1e9f, 1.0f, 1.0f - 0x1p-24f), 1.0f - (1.0f - 1e9f) * 0x1p-24f);
}

TEST(Merged, TakesNothingOfAValueWithoutWeight) {
  for (const float value : {std::nanf(""), kInfinity, -1.0f}) {
    EXPECT_EQ(merged(value, 4.0f, 1.0f), 4.0f);
    EXPECT_TRUE(std::signbit(merged(value, -0.0f, 1.0f)));
  }
}

}  // namespace
}  // namespace te
