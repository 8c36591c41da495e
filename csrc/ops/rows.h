// A tensor as rows of one distance, each of which is contiguous.
#pragma once

#include <string_view>

#include "core/tensor_view.h"

namespace te {

struct Rows {
  char* data;
  int64_t count;
  int64_t bytes;  // of a row
  int64_t pitch;  // from one to the next
};

// As many rows, of as many bytes, at another place.
inline Rows placed(const Rows& rows, char* data, int64_t pitch) {
  return {.data = data, .count = rows.count, .bytes = rows.bytes, .pitch = pitch};
}
inline Rows without_gaps(const Rows& rows, char* data) { return placed(rows, data, rows.bytes); }

// Fails where the rows of a tensor have several distances, or overlap.
Rows rows_of(const TensorView& x, std::string_view op, std::string_view name);

}  // namespace te
