// The arithmetic of rotary position embedding, shared by both backends: the rotation of a pair of
// elements, its transpose for the backward, and the sine and cosine of an angle.
#pragma once

#include <cmath>
#include <limits>

#include "core/bits.h"
#include "core/hd.h"

namespace te {

struct RopePair {
  float a, b;
};

// cos and sin of the angles of the two elements, which a table of angles may choose separately.
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

// The sine and cosine of an angle, with an error of at most 2 ulp and without branches. (sincosf
// has a branch for angles above 105615, which long sequences reach, and that code needs more
// registers than the rest of a kernel.) Angles of 2^50 and more give NaN: there, neighbouring
// floats are millions of turns apart.
TE_HD SineCosine sine_cosine(float angle) {
  // The nearest multiple of pi/2 is subtracted, in fp64 and in two steps (pi/2 = kQuarter + kRest).
  // Adding 1.5 * 2^52 rounds angle / (pi/2) to an integer and leaves it in the low bits of the sum.
  constexpr double kRound = 0x1.8p52, kQuarter = 0x1.921fb54442d18p0, kRest = 0x1.1a62633145c07p-54;
  const double sum = std::fma(static_cast<double>(angle), 0x1.45f306dc9c883p-1, kRound);
  const double number = sum - kRound;
  const double inner =
      std::fma(number, -kRest, std::fma(number, -kQuarter, static_cast<double>(angle)));
  const float r = std::fabs(angle) < 0x1p50f ? static_cast<float>(inner)
                                             : std::numeric_limits<float>::quiet_NaN();
  // Polynomials on [-pi/4, pi/4], whose coefficients minimise the largest relative error.
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
