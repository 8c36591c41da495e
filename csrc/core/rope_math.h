// One pair of elements turned by its angles, or (backward) its gradient turned back.
#pragma once

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
TE_HD RopePair turn(RopePair x, const RopeAngles& f) {
  if constexpr (kBackward) return {x.a * f.cos_a + x.b * f.sin_b, x.b * f.cos_b - x.a * f.sin_a};
  return {x.a * f.cos_a - x.b * f.sin_a, x.b * f.cos_b + x.a * f.sin_b};
}

}  // namespace te
