// Column sums (bias, gamma and beta gradients) in two deterministic stages: each block writes the
// fp32 sums of its rows, a second kernel adds the parts in order. This is the room for the parts.
#pragma once

#include <cstdint>

namespace te {

// No kernel that leaves partial sums works on fewer rows per part than this.
inline constexpr int64_t kRowsPerColumnPart = 32;

constexpr int64_t column_sum_workspace_bytes(int64_t rows, int64_t cols) {
  return (rows + kRowsPerColumnPart - 1) / kRowsPerColumnPart * cols * 4;
}

}  // namespace te
