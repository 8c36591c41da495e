// Activation functions and their derivatives in fp32. Both backends compile this code.
//
// GELU (tanh form), QuickGELU and SiLU are one function with different numbers, because
// 0.5 (1 + tanh(u)) = sigmoid(2u):
//   y  = x s                        s = sigmoid(p(x)),  p(x) = x (linear + cubic x^2)
//   y' = s + x s (1 - s) p'(x)      p'(x) = linear + 3 cubic x^2
// ReLU and squared ReLU share a second function. The value at NaN is NaN for all of them.
//
// A gated activation is act(x1) * h(x2), where h(x2) is x2 itself, or x2 clamped and shifted.
#pragma once

#include <cmath>
#include <cstdint>

#include "core/error.h"
#include "core/hd.h"

namespace te {

// The numbers are part of the Python binding. A gated activation has an odd number, and its plain
// form the even number before that. The last two have no plain form, so 10 and 12 are unused.
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

// Parameters of ClampedSwiglu; other kinds ignore them. The defaults are those of gpt-oss.
struct ActivationParameters {
  float limit = 7.0f;    // x1 is clamped to at most limit, x2 to [-limit, limit]
  float alpha = 1.702f;  // factor of the sigmoid's argument
  float offset = 1.0f;   // added to the clamped x2
};

constexpr bool is_gated(ActivationKind kind) { return static_cast<int32_t>(kind) % 2 == 1; }

// 1 / (1 + 2^q). The device takes two approximate instructions (ex2, rcp) with a relative error of
// about 2e-7, which flush results below the smallest normal number to zero.
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

// GELU, QuickGELU and SiLU: x sigmoid(p(x)), see the top of this file. Beyond +-limit the sigmoid
// is 1 in fp32, or smaller than every normal number. So x is clamped to [-limit, limit], which
// avoids inf * 0 and gives the right limits at infinity: value 0 or inf, derivative 0 or 1.
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
  // sigmoid(p(x)) as 1 / (1 + 2^(-p(x) log2(e))), because the hardware computes powers of 2.
  TE_HD float sigmoid(float x) const {
    return reciprocal_of_1_plus_exp2(x * (-kLog2E * linear + -kLog2E * cubic * (x * x)));
  }
};

// sigmoid(x), with the derivative s (1 - s). The factor 1 - s is computed as sigmoid(-x), because
// the subtraction would lose digits where s is near 1.
struct LogisticUnit {
  TE_HD float value(float x) const { return reciprocal_of_1_plus_exp2(-kLog2E * x); }
  TE_HD ValueAndGradient value_and_gradient(float x, float dy) const {
    const float s = value(x);
    return {s, dy * (s * value(-x))};
  }
};

// ReLU or its square. For x <= 0 the gradient is exactly zero, even if dy is Inf or NaN.
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

// g sigmoid(alpha g), g = min(x, limit). The gradient is zero for x > limit, but not at the limit
// itself. x is also clamped to at least `lowest`, where the sigmoid is smaller than every normal
// number.
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

// Calls f(unit, factor) with the functors that compute act and h of this kind.
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
