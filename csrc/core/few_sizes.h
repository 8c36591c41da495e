// Rounds sizes up to few different ones, so that what is built for a size serves similar sizes.
#pragma once

#include <algorithm>
#include <bit>
#include <cstdint>

namespace te {

// The next size that is not less than n. There are `steps` sizes from each power of two to the
// next, so that n grows by less than a `steps`-th part.
inline int64_t round_to_few_sizes(int64_t n, int64_t steps) {
  const auto power =
      static_cast<int64_t>(std::bit_floor(static_cast<uint64_t>(std::max<int64_t>(n, 1))));
  const int64_t step = std::max<int64_t>(1, power / steps);
  return (n + step - 1) / step * step;
}

}  // namespace te
