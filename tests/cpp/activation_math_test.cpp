// Compares the activations in fp32 with their definitions in double: values, derivatives, limits.
#include "core/activation_math.h"

#include <gtest/gtest.h>

#include <cmath>
#include <limits>

namespace te {
namespace {

constexpr float kInfinity = std::numeric_limits<float>::infinity();
constexpr float kNaN = std::numeric_limits<float>::quiet_NaN();
constexpr ActivationKind kPlain[] = {ActivationKind::Gelu, ActivationKind::Qgelu,
                                     ActivationKind::Relu, ActivationKind::Srelu,
                                     ActivationKind::Silu};

double definition(ActivationKind kind, double x) {
  switch (kind) {
    case ActivationKind::Gelu:
      return 0.5 * x * (1.0 + std::tanh(std::sqrt(2.0 / M_PI) * (x + 0.044715 * x * x * x)));
    case ActivationKind::Qgelu: return x / (1.0 + std::exp(-1.702 * x));
    case ActivationKind::Relu: return std::fmax(x, 0.0);
    case ActivationKind::Srelu: return std::fmax(x, 0.0) * std::fmax(x, 0.0);
    case ActivationKind::Silu: return x / (1.0 + std::exp(-x));
    default: return NAN;
  }
}

double derivative(ActivationKind kind, double x) {
  constexpr double kStep = 1e-5;
  return (definition(kind, x + kStep) - definition(kind, x - kStep)) / (2.0 * kStep);
}

float value(ActivationKind kind, float x) {
  return dispatch_activation(kind, {}, [&](auto unit, auto) { return unit.value(x); });
}

ValueAndGradient value_and_gradient(ActivationKind kind, float x, float dy) {
  return dispatch_activation(kind, {},
                             [&](auto unit, auto) { return unit.value_and_gradient(x, dy); });
}

TEST(ActivationMath, ValueAndDerivativeFollowTheDefinition) {
  for (const ActivationKind kind : kPlain) {
    for (float x = -12.0f; x <= 12.0f; x += 1.0f / 64.0f) {
      const double expected = definition(kind, x);
      EXPECT_NEAR(value(kind, x), expected, 4e-6 * std::fabs(expected) + 1e-12) << x;
      if (x == 0.0f) continue;  // where relu has no derivative
      const auto [same, gradient] = value_and_gradient(kind, x, 3.0f);
      EXPECT_EQ(same, value(kind, x)) << x;
      EXPECT_NEAR(gradient, 3.0 * derivative(kind, x), 2e-5) << x;
    }
  }
}

TEST(ActivationMath, EndsAtItsLimits) {
  for (const ActivationKind kind : kPlain) {
    const bool squared = kind == ActivationKind::Srelu;
    for (const float x : {1e3f, 1e20f, 3e38f, kInfinity}) {
      EXPECT_EQ(value(kind, -x), 0.0f);
      EXPECT_EQ(value(kind, x), squared ? x * x : x);
      EXPECT_EQ(value_and_gradient(kind, -x, 2.0f).gradient, 0.0f);
      EXPECT_EQ(value_and_gradient(kind, x, 2.0f).gradient, squared ? 4.0f * x : 2.0f);
    }
  }
}

TEST(ActivationMath, ReluHasNoSlopeAtZeroAndBlocksAnOverflowedGradient) {
  for (const ActivationKind kind : {ActivationKind::Relu, ActivationKind::Srelu}) {
    for (const float x : {-1.0f, -0.0f, 0.0f})
      EXPECT_EQ(value_and_gradient(kind, x, kInfinity).gradient, 0.0f);
  }
}

TEST(ActivationMath, NaNGoesThrough) {
  for (const ActivationKind kind : kPlain) {
    EXPECT_TRUE(std::isnan(value(kind, kNaN)));
    EXPECT_TRUE(std::isnan(value_and_gradient(kind, kNaN, 1.0f).value));
    EXPECT_TRUE(std::isnan(value_and_gradient(kind, 1.0f, kNaN).gradient));
  }
}

constexpr ActivationParameters kTight{.limit = 2.0f, .alpha = 1.5f, .offset = 0.5f};

// y = act(x1) * h(x2) of ClampedSwiglu, and its two derivatives for dy = 1.
struct Clamped {
  float y, dx1, dx2;
};

Clamped clamped(float x1, float x2) {
  return dispatch_activation(
      ActivationKind::ClampedSwiglu, kTight, [&](auto unit, auto factor) -> Clamped {
        if constexpr (decltype(factor)::kGated) {
          const auto [value, gradient] = unit.value_and_gradient(x1, factor.value(x2));
          return {value * factor.value(x2), gradient, factor.gradient(x2, value)};
        }
        return {};
      });
}

TEST(ActivationMath, ClampedSwigluFollowsItsDefinition) {
  const auto gate = [](double x) {
    const double held = std::fmin(x, 2.0);
    return held / (1.0 + std::exp(-1.5 * held));
  };
  const auto factor = [](double x) { return std::fmax(std::fmin(x, 2.0), -2.0) + 0.5; };
  for (float x1 = -30.0f; x1 <= 6.0f; x1 += 1.0f / 16.0f) {
    for (const float x2 : {-9.0f, -2.0f, -1.5f, 0.0f, 1.25f, 2.0f, 2.5f, kInfinity}) {
      const auto [y, dx1, dx2] = clamped(x1, x2);
      const double expected = gate(x1) * factor(x2);
      EXPECT_NEAR(y, expected, 4e-6 * std::fabs(expected) + 1e-12) << x1 << " " << x2;
      const double slope = (gate(x1 + 1e-5) - gate(x1 - 1e-5)) / 2e-5;
      if (x1 != 2.0f) {
        EXPECT_NEAR(dx1, slope * factor(x2), 2e-5) << x1 << " " << x2;
      }
      EXPECT_NEAR(dx2, std::fabs(x2) <= 2.0f ? gate(x1) : 0.0, 2e-5) << x1 << " " << x2;
    }
  }
}

TEST(ActivationMath, ClampedSwigluHoldsInfinityAndKeepsNaN) {
  EXPECT_EQ(clamped(-kInfinity, 1.0f).y, 0.0f);
  EXPECT_EQ(clamped(-kInfinity, 1.0f).dx1, 0.0f);
  EXPECT_EQ(clamped(kInfinity, -kInfinity).y, clamped(2.0f, -2.0f).y);
  EXPECT_EQ(clamped(kInfinity, 1.0f).dx1, 0.0f);
  EXPECT_GT(clamped(2.0f, 2.0f).dx1, 0.0f);  // the limits themselves are not cut off
  EXPECT_GT(clamped(2.0f, 2.0f).dx2, 0.0f);
  EXPECT_TRUE(std::isnan(clamped(kNaN, 1.0f).y) && std::isnan(clamped(kNaN, 1.0f).dx1));
  EXPECT_TRUE(std::isnan(clamped(1.0f, kNaN).y) && std::isnan(clamped(1.0f, kNaN).dx1));
}

TEST(ActivationMath, UnknownKindsAreRefused) {
  EXPECT_THROW(value(static_cast<ActivationKind>(10), 1.0f), Error);
}

}  // namespace
}  // namespace te
