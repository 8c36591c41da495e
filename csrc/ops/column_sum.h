// Column sums (bias, gamma and beta gradients) in two deterministic stages: each block writes the
// fp32 sums of its rows, and a second kernel adds these partial sums in order. This header has the
// size of the memory between the two.
#pragma once

#include <cstdint>

namespace te {

// The least number of rows over which a kernel takes one partial sum.
inline constexpr int64_t kRowsPerColumnPart = 32;

constexpr int64_t column_sum_workspace_bytes(int64_t rows, int64_t cols) {
  return (rows + kRowsPerColumnPart - 1) / kRowsPerColumnPart * cols * 4;
}

}  // namespace te
