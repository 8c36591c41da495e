// Compares the shares of sets of keys with their values in double, and checks the special cases.
#include "core/merge_math.h"

#include <gtest/gtest.h>

namespace te {
namespace {

constexpr float kInfinity = std::numeric_limits<float>::infinity();
const float kNan = std::nanf("");

TEST(SharesOf, AreThoseOfTheExactExponentials) {
  for (float a = -90.0f; a < 90.0f; a += 0.73f) {
    for (float b = a - 40.0f; b < a + 40.0f; b += 0.91f) {
      float shares[] = {a, b, a + 1.0f};
      const double largest = std::fmax(a + 1.0f, b);
      const double exact[] = {std::exp(a - largest), std::exp(b - largest),
                              std::exp(double{a + 1.0f} - largest)};
      const double total = exact[0] + exact[1] + exact[2];
      const double sum = largest + std::log(total);
      EXPECT_NEAR(shares_of(shares), sum, std::fabs(sum) * 2e-7 + 2e-7) << a << ' ' << b;
      for (int k = 0; k < 3; ++k)  // rounding a difference of 40 makes its exponential 2e-6 wrong
        EXPECT_NEAR(shares[k], exact[k] / total, exact[k] / total * 5e-6) << a << ' ' << b;
    }
  }
}

TEST(SharesOf, IsAllOfTheOnlySetWithKeys) {
  for (const float sum : {3.0f, -1e30f, kNan}) {
    float shares[] = {kNoKey, sum, kNoKey};
    const float merged = shares_of(shares);
    EXPECT_TRUE(merged == sum || std::isnan(sum));
    EXPECT_EQ(shares[0], 0.0f);
    EXPECT_EQ(shares[1], 1.0f);
    EXPECT_EQ(shares[2], 0.0f);
  }
}

TEST(SharesOf, IsNothingWhereNoSetHasKeys) {
  float shares[] = {kNoKey, kNoKey};
  EXPECT_EQ(shares_of(shares), kInfinity);
  EXPECT_EQ(shares[0], 0.0f);
  EXPECT_EQ(shares[1], 0.0f);
}

TEST(SharesOf, KeepsNan) {
  float shares[] = {kNan, 1.0f, kNoKey};
  EXPECT_TRUE(std::isnan(shares_of(shares)));
  EXPECT_TRUE(std::isnan(shares[0]) && std::isnan(shares[1]));
  EXPECT_EQ(shares[2], 0.0f);
}

TEST(WithNoKey, TakesEitherInfinity) {
  EXPECT_EQ(with_no_key(kInfinity), kNoKey);
  EXPECT_EQ(with_no_key(-kInfinity), kNoKey);
  EXPECT_EQ(with_no_key(1.0f), 1.0f);
  EXPECT_TRUE(std::isnan(with_no_key(kNan)));
}

}  // namespace
}  // namespace te
