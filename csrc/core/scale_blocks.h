// Which values of an FP8 matrix share a scale, and where the inverse scales of a matrix lie.
//
//   Whole    one scale: fp32 [2] = {1 / scale, scale}
//   Rows     1 x 128 values of a row: the inverse scale of (i, j) is at [j / 128, i] of
//            fp32 [ceil(cols / 128), rows rounded up to 4]
//   Squares  128 x 128 values: the inverse scale of (i, j) is at [i / 128, j / 128] of
//            fp32 [ceil(rows / 128), ceil(cols / 128) rounded up to 4]
//
// These are the layouts that cuBLASLt reads (VEC128_32F, BLK128x128_32F). The elements that
// rounding up adds are zero.
#pragma once

#include <cstdint>
#include <ostream>

#include "core/hd.h"

namespace te {

// The values are the number of dimensions of a block, and part of the Python binding.
enum class ScaleBlocks : int32_t { Whole = 0, Rows = 1, Squares = 2 };

inline constexpr int kScaleBlock = 128;

inline std::ostream& operator<<(std::ostream& out, ScaleBlocks blocks) {
  switch (blocks) {
    case ScaleBlocks::Whole: return out << "one scale";
    case ScaleBlocks::Rows: return out << "1 x 128 blocks";
    case ScaleBlocks::Squares: return out << "128 x 128 blocks";
  }
  return out << "unknown blocks";
}

struct ScaleGrid {
  int64_t rows = 0, cols = 0;  // of the fp32 matrix of inverse scales
  bool along_rows = false;     // true: ScaleBlocks::Rows, false: Squares

  TE_HD int64_t at(int64_t row, int64_t col) const {
    return along_rows ? col / kScaleBlock * cols + row
                      : row / kScaleBlock * cols + col / kScaleBlock;
  }
};

// The grid of inverse scales of a [rows, cols] matrix.
constexpr ScaleGrid scale_grid(ScaleBlocks blocks, int64_t rows, int64_t cols) {
  const auto blocks_of = [](int64_t size) { return (size + kScaleBlock - 1) / kScaleBlock; };
  const auto padded = [](int64_t size) { return (size + 3) / 4 * 4; };
  if (blocks == ScaleBlocks::Rows) return {blocks_of(cols), padded(rows), true};
  return {blocks_of(rows), padded(blocks_of(cols)), false};
}

}  // namespace te
