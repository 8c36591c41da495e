// One pair of elements rotated by its angles, or (backward) its gradient rotated back; and the sine
// and cosine of an angle.
#pragma once

#include <cmath>
#include <limits>

#include "core/bits.h"
#include "core/hd.h"

namespace te {

struct RopePair {
  float a, b;
};

// cos and sin of each element's own angle.
struct RopeAngles {
  float cos_a, sin_a, cos_b, sin_b;
};

template <bool kBackward>
TE_HD RopePair rotate(RopePair x, const RopeAngles& f) {
  if constexpr (kBackward) return {x.a * f.cos_a + x.b * f.sin_b, x.b * f.cos_b - x.a * f.sin_a};
  return {x.a * f.cos_a - x.b * f.sin_a, x.b * f.cos_b + x.a * f.sin_b};
}

struct SineCosine {
  float sine, cosine;
};

// Within 2 units of the last place, without branches. (sincosf branches at 105615, a position that
// sequences reach, into code that takes more registers than all else in a kernel.) NaN from 2^50
// on, where neighbouring floats are millions of turns apart.
TE_HD SineCosine sine_cosine(float angle) {
  // The nearest multiple of a quarter turn is subtracted in two parts. Adding 1.5 * 2^52 leaves the
  // number of that multiple in the low bits of the sum.
  constexpr double kRound = 0x1.8p52, kQuarter = 0x1.921fb54442d18p0, kRest = 0x1.1a62633145c07p-54;
  const double sum = std::fma(static_cast<double>(angle), 0x1.45f306dc9c883p-1, kRound);
  const double number = sum - kRound;
  const double inner =
      std::fma(number, -kRest, std::fma(number, -kQuarter, static_cast<double>(angle)));
  const float r = std::fabs(angle) < 0x1p50f ? static_cast<float>(inner)
                                             : std::numeric_limits<float>::quiet_NaN();
  // On [-pi/4, pi/4]; the coefficients minimise the largest relative error.
  const float z = r * r;
  const float odd = std::fma(std::fma(-1.9515250e-4f, z, 8.3321603e-3f), z, -0.16666655f);
  const float even = std::fma(std::fma(2.4438415e-5f, z, -1.3887368e-3f), z, 4.1666646e-2f);
  const float sine = std::fma(z * r, odd, r);
  const float cosine = std::fma(z, std::fma(z, even, -0.5f), 1.0f);
  const uint32_t quarter = low_bits(sum);
  const float s = quarter & 1 ? cosine : sine, c = quarter & 1 ? sine : cosine;
  return {quarter & 2 ? -s : s, (quarter + 1) & 2 ? -c : c};
}

}  // namespace te
