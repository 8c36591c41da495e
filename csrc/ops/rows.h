// A tensor as contiguous rows at equal distances in memory, as cudaMemcpy2D takes it.
#pragma once

#include <string_view>

#include "core/tensor_view.h"

namespace te {

struct Rows {
  char* data;
  int64_t count;
  int64_t bytes;  // of a row
  int64_t pitch;  // bytes from one row to the next
};

// Rows of the same number and size at another address.
inline Rows placed(const Rows& rows, char* data, int64_t pitch) {
  return {.data = data, .count = rows.count, .bytes = rows.bytes, .pitch = pitch};
}
inline Rows without_gaps(const Rows& rows, char* data) { return placed(rows, data, rows.bytes); }

// Throws if the rows of the tensor have different distances, or overlap.
Rows rows_of(const TensorView& x, std::string_view op, std::string_view name);

}  // namespace te
