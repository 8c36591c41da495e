// Compares the sine and cosine of an fp32 angle with those in double.
#include "core/rope_math.h"

#include <gtest/gtest.h>

#include <algorithm>

namespace te {
namespace {

// The error in units of the last place (ulp) of a float.
double error(float value, double exact) {
  return std::fabs(value - exact) / std::ldexp(1.0, std::ilogb(exact) - 23);
}

TEST(SineCosine, AreWithinTwoUnitsOfTheLastPlace) {
  double worst = 0;
  for (float angle = 0x1p-30f; angle < 0x1p50f; angle *= 1.0001f) {
    for (const float signed_angle : {angle, -angle}) {
      const SineCosine result = sine_cosine(signed_angle);
      worst = std::max({worst, error(result.sine, std::sin(double{signed_angle})),
                        error(result.cosine, std::cos(double{signed_angle}))});
    }
  }
  EXPECT_LT(worst, 2);
}

TEST(SineCosine, OfZeroAreExact) {
  EXPECT_EQ(sine_cosine(0.0f).sine, 0.0f);
  EXPECT_EQ(sine_cosine(0.0f).cosine, 1.0f);
}

TEST(SineCosine, AreNanWhereAnglesMeanNothing) {
  constexpr float kInfinity = std::numeric_limits<float>::infinity();
  for (const float angle : {0x1p50f, -0x1p50f, kInfinity, -kInfinity, std::nanf("")}) {
    EXPECT_TRUE(std::isnan(sine_cosine(angle).sine)) << angle;
    EXPECT_TRUE(std::isnan(sine_cosine(angle).cosine)) << angle;
  }
}

}  // namespace
}  // namespace te
