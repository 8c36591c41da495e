#include "ops/rows.h"

#include "core/error.h"

namespace te {
namespace {

// The first axis of a row: the axes from here on are contiguous.
int first_of_row(const TensorView& x) {
  int64_t length = 1;
  int axis = x.rank;
  while (axis > 0 && (x.size(axis - 1) == 1 || x.stride(axis - 1) == length))
    length *= x.size(--axis);
  return axis;
}

// The distance between rows, in elements. Throws if the axes before `row` have no common distance.
int64_t distance(const TensorView& x, int row, std::string_view op, std::string_view name) {
  int64_t pitch = 0, rows = 1;
  for (int axis = row - 1; axis >= 0; --axis) {
    if (x.size(axis) == 1) continue;
    if (pitch == 0) pitch = x.stride(axis);
    require(x.stride(axis) == pitch * rows, Kind::Value, op, "expected ", name,
            " with rows of one distance, got strides of several");
    rows *= x.size(axis);
  }
  return pitch;
}

}  // namespace

Rows rows_of(const TensorView& x, std::string_view op, std::string_view name) {
  const int row = first_of_row(x);
  int64_t length = 1;
  for (int axis = row; axis < x.rank; ++axis) length *= x.size(axis);
  const int64_t pitch = row == 0 ? length : distance(x, row, op, name);
  require(pitch >= length, Kind::Value, op, "expected ", name,
          " with rows that do not overlap, got a distance of ", pitch, " for ", Elements{length});
  return {.data = x.ptr<char>(),
          .count = length == 0 ? 0 : x.numel() / length,
          .bytes = length * size_of(x.dtype),
          .pitch = pitch * size_of(x.dtype)};
}

}  // namespace te
