// Activations and their derivatives in fp32, one text for both backends.
//
// GELU (tanh form), QuickGELU and SiLU are one function with different numbers, because
// 0.5 (1 + tanh(u)) = sigmoid(2u):
//   y  = x s                        s = sigmoid(p(x)),  p(x) = x (linear + cubic x^2)
//   y' = s + x s (1 - s) p'(x)      p'(x) = linear + 3 cubic x^2
// ReLU and squared ReLU are the other pair. NaN goes through both.
//
// A gated activation is act(x1) * h(x2): h is x2 itself, or x2 clamped and shifted.
#pragma once

#include <cmath>
#include <cstdint>

#include "core/error.h"
#include "core/hd.h"

namespace te {

// The numbers are part of the Python binding; the odd ones are gated. The last two have no plain
// form, so 10 and 12 are none.
enum class ActivationKind : int32_t {
  Gelu = 0,  // tanh form
  Geglu = 1,
  Qgelu = 2,  // x * sigmoid(1.702 x)
  Qgeglu = 3,
  Relu = 4,
  Reglu = 5,
  Srelu = 6,  // relu(x)^2
  Sreglu = 7,
  Silu = 8,  // x * sigmoid(x)
  Swiglu = 9,
  ClampedSwiglu = 11,  // g sigmoid(alpha g) * (clamp(x2) + offset), g = min(x1, limit)
  Glu = 13,            // sigmoid(x1) * x2
};

// Of the clamped kind; others ignore them. The defaults are those of gpt-oss.
struct ActivationParameters {
  float limit = 7.0f;  // of x1 from above, of x2 from both sides
  float alpha = 1.702f;
  float offset = 1.0f;  // added to the clamped x2
};

constexpr bool is_gated(ActivationKind kind) { return static_cast<int32_t>(kind) % 2 == 1; }

// 1 / (1 + 2^q). The device's two approximate instructions are good to about 2e-7 of the result;
// what is smaller than the smallest normal number becomes zero there.
TE_HD float reciprocal_of_1_plus_exp2(float q) {
#if defined(__CUDA_ARCH__)
  float power, result;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(power) : "f"(q));
  asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(result) : "f"(power + 1.0f));
  return result;
#else
  return 1.0f / (1.0f + std::exp2(q));
#endif
}

// max(x, bound) and min(x, bound) that keep a NaN in x.
TE_HD float at_least(float x, float bound) {
#if defined(__CUDA_ARCH__)
  float result;
  asm("max.NaN.f32 %0, %1, %2;" : "=f"(result) : "f"(x), "f"(bound));
  return result;
#else
  return x < bound ? bound : x;
#endif
}

TE_HD float at_most(float x, float bound) {
#if defined(__CUDA_ARCH__)
  float result;
  asm("min.NaN.f32 %0, %1, %2;" : "=f"(result) : "f"(x), "f"(bound));
  return result;
#else
  return x > bound ? bound : x;
#endif
}

constexpr float kLog2E = 1.44269504f;

struct ValueAndGradient {
  float value;     // act(x)
  float gradient;  // dy * act'(x)
};

// Beyond +-limit the sigmoid is 0 or 1 in fp32. Holding x there keeps inf * 0 out of the formulas,
// and the results at infinity are their limits: value 0 or inf, derivative 0 or 1.
struct SigmoidUnit {
  float linear, cubic, limit;

  TE_HD float value(float x) const { return at_least(x, -limit) * sigmoid(hold(x)); }
  TE_HD ValueAndGradient value_and_gradient(float x, float dy) const {
    const float held = hold(x), s = sigmoid(held);
    const float slope = linear + 3.0f * cubic * (held * held);
    return {at_least(x, -limit) * s, dy * (s + held * slope * (s - s * s))};
  }

 private:
  TE_HD float hold(float x) const { return at_most(at_least(x, -limit), limit); }
  // sigmoid(p(x)): the exponential is taken to the base that the hardware has.
  TE_HD float sigmoid(float x) const {
    return reciprocal_of_1_plus_exp2(x * (-kLog2E * linear + -kLog2E * cubic * (x * x)));
  }
};

// sigmoid(x). What is left to 1 is sigmoid(-x): a difference would lose its digits.
struct LogisticUnit {
  TE_HD float value(float x) const { return reciprocal_of_1_plus_exp2(-kLog2E * x); }
  TE_HD ValueAndGradient value_and_gradient(float x, float dy) const {
    const float s = value(x);
    return {s, dy * (s * value(-x))};
  }
};

// Where the unit is off the gradient is zero, whatever comes in (an overflowed dy, say).
struct RectifiedUnit {
  bool squared;

  TE_HD float value(float x) const {
    const float positive = x <= 0.0f ? 0.0f : x;
    return squared ? positive * positive : positive;
  }
  TE_HD ValueAndGradient value_and_gradient(float x, float dy) const {
    return {value(x), x <= 0.0f ? 0.0f : squared ? dy * (2.0f * x) : dy};
  }
};

// g sigmoid(alpha g), g = min(x, limit). The gradient is zero where x is cut off; at the
// limit itself it is not. Below `lowest` the sigmoid is 0.
struct ClampedUnit {
  float alpha, lowest, limit;

  TE_HD float value(float x) const {
    const float held = hold(x);
    return held * sigmoid(held);
  }
  TE_HD ValueAndGradient value_and_gradient(float x, float dy) const {
    const float held = hold(x), s = sigmoid(held), value = held * s;
    return {value, x > limit ? 0.0f : dy * (s + alpha * (value - value * s))};
  }

 private:
  TE_HD float hold(float x) const { return at_most(at_least(x, lowest), limit); }
  TE_HD float sigmoid(float x) const { return reciprocal_of_1_plus_exp2(x * (-kLog2E * alpha)); }
};

// The factor h(x2) of a gated activation, and dy * h'(x2).
struct NoFactor {
  static constexpr bool kGated = false;
};

struct PlainFactor {
  static constexpr bool kGated = true;

  TE_HD float value(float x) const { return x; }
  TE_HD float gradient(float, float dy) const { return dy; }
};

struct ClampedFactor {
  static constexpr bool kGated = true;
  float limit, offset;

  TE_HD float value(float x) const { return at_most(at_least(x, -limit), limit) + offset; }
  TE_HD float gradient(float x, float dy) const { return x < -limit || x > limit ? 0.0f : dy; }
};

// Calls f(unit, factor) with what is behind the kind.
template <class F>
decltype(auto) dispatch_activation(ActivationKind kind, const ActivationParameters& p, F&& f) {
  constexpr float kGeluLinear = 1.5957691216f;  // 2 sqrt(2 / pi)
  constexpr float kSiluLimit = 92.0f, kMostLimit = 3e38f;
  const auto plain_or_gated = [&](auto unit) {
    return is_gated(kind) ? f(unit, PlainFactor{}) : f(unit, NoFactor{});
  };
  switch (kind) {
    case ActivationKind::Gelu:
    case ActivationKind::Geglu:
      return plain_or_gated(SigmoidUnit{kGeluLinear, 0.044715f * kGeluLinear, 10.25f});
    case ActivationKind::Qgelu:
    case ActivationKind::Qgeglu: return plain_or_gated(SigmoidUnit{1.702f, 0.0f, 54.0f});
    case ActivationKind::Silu:
    case ActivationKind::Swiglu: return plain_or_gated(SigmoidUnit{1.0f, 0.0f, kSiluLimit});
    case ActivationKind::Relu:
    case ActivationKind::Reglu: return plain_or_gated(RectifiedUnit{false});
    case ActivationKind::Srelu:
    case ActivationKind::Sreglu: return plain_or_gated(RectifiedUnit{true});
    case ActivationKind::ClampedSwiglu:
      return f(ClampedUnit{p.alpha, -std::fmin(kSiluLimit / p.alpha, kMostLimit), p.limit},
               ClampedFactor{p.limit, p.offset});
    case ActivationKind::Glu: return f(LogisticUnit{}, PlainFactor{});
  }
  fail(Kind::Value, "activation", "expected a kind from 0 to 9, 11 or 13, got ",
       static_cast<int32_t>(kind));
}

}  // namespace te
