// The CPU backend of quantize_blocks, which defines its results: see ops/quantize_blocks.h. Threads
// share tiles of 128 x 128 values, which contain whole blocks of every kind. For a tile, the first
// pass computes amaxes, from which the scales follow, and the second pass writes codes.
#include "ops/quantize_blocks.h"

#include <algorithm>
#include <array>
#include <cmath>

#include "core/parallel.h"
#include "core/scaling.h"
#include "cpu/column_sum.h"

namespace te::cpu {
namespace {

constexpr int64_t kElementsPerThread = 1 << 17;

using LineValues = std::array<float, kScaleBlock>;  // one for each row, or column, of a tile

struct Tile {
  int64_t top, left;   // first row and column
  int64_t rows, cols;  // that exist

  Tile(int64_t tile_row, int64_t tile_col, const TensorView& x)
      : top(tile_row * kScaleBlock),
        left(tile_col * kScaleBlock),
        rows(std::min<int64_t>(kScaleBlock, x.rows() - top)),
        cols(std::min<int64_t>(kScaleBlock, x.cols() - left)) {}
};

// Replaces the amaxes of the lines (rows or columns) of a tile by their scales, and writes the
// inverse scales to `side`. A line of the tile is a part of a row of `side`: the block of line i
// begins at (first + i, along). The matrix has `count` lines in this tile; the inverse scales of
// others are padding.
template <class In>
void find_scales(const QuantizeBlocksArgs& args, const BlockCodes& side, int64_t first,
                 int64_t along, int64_t count, LineValues& values) {
  for (float& value : values)
    value = block_scale<In>(value, max_of(args.dtype), args.epsilon, args.power_of_2);
  if (!side) return;
  const ScaleGrid grid = scale_grid(args.blocks, side.codes.rows(), side.codes.cols());
  float* inverses = side.scales.ptr<float>();
  if (!grid.along_rows) {
    inverses[grid.at(first, along)] = divide(1.0f, values[0]);
    return;
  }
  for (int64_t i = 0; i < std::min<int64_t>(kScaleBlock, grid.cols - first); ++i)
    inverses[grid.at(first + i, along)] =
        i < count ? divide(1.0f, values[static_cast<size_t>(i)]) : 0.0f;
}

template <class In, class Fp8>
void quantize_tile(const QuantizeBlocksArgs& args, const Tile& tile) {
  const int64_t rows = args.x.rows(), cols = args.x.cols();
  const In* x = args.x.ptr<In>();
  LineValues of_rows{}, of_cols{};
  for (int64_t i = 0; i < tile.rows; ++i) {
    for (int64_t j = 0; j < tile.cols; ++j) {
      const float magnitude =
          std::fabs(static_cast<float>(x[(tile.top + i) * cols + tile.left + j]));
      float& row = of_rows[static_cast<size_t>(i)];
      float& col = of_cols[static_cast<size_t>(j)];
      row = max_ignoring_nan(row, magnitude);
      col = max_ignoring_nan(col, magnitude);
    }
  }
  if (args.blocks == ScaleBlocks::Squares) {
    of_rows.fill(*std::max_element(of_rows.begin(), of_rows.end()));
    of_cols.fill(of_rows[0]);
  }
  find_scales<In>(args, args.rowwise, tile.top, tile.left, tile.rows, of_rows);
  find_scales<In>(args, args.columnwise, tile.left, tile.top, tile.cols, of_cols);
  uint8_t* rowwise = args.rowwise.codes.ptr<uint8_t>();
  uint8_t* columnwise = args.columnwise.codes.ptr<uint8_t>();
  for (int64_t i = 0; i < tile.rows; ++i) {
    for (int64_t j = 0; j < tile.cols; ++j) {
      const int64_t row = tile.top + i, col = tile.left + j;
      const float value = static_cast<float>(x[row * cols + col]);
      if (rowwise) rowwise[row * cols + col] = Fp8::encode(value * of_rows[static_cast<size_t>(i)]);
      if (columnwise)
        columnwise[col * rows + row] = Fp8::encode(value * of_cols[static_cast<size_t>(j)]);
    }
  }
}

// Sets the padding of the inverse scales of 128 x 128 blocks to zero. That of 1 x 128 blocks is
// written by find_scales.
void clear_padding(const BlockCodes& side, ScaleBlocks blocks) {
  if (!side || blocks != ScaleBlocks::Squares) return;
  const ScaleGrid grid = scale_grid(blocks, side.codes.rows(), side.codes.cols());
  const int64_t used = (side.codes.cols() + kScaleBlock - 1) / kScaleBlock;
  for (int64_t i = 0; i < grid.rows; ++i)
    std::fill_n(side.scales.ptr<float>() + i * grid.cols + used, grid.cols - used, 0.0f);
}

}  // namespace

void quantize_blocks(const QuantizeBlocksArgs& args) {
  const TensorView& x = args.x;
  const int64_t tile_rows = (x.rows() + kScaleBlock - 1) / kScaleBlock;
  const int64_t tile_cols = (x.cols() + kScaleBlock - 1) / kScaleBlock;
  dispatch_high_precision(x.dtype, "quantize_blocks", [&](auto in) {
    using In = typename decltype(in)::type;
    dispatch_fp8(args.dtype, "quantize_blocks", [&](auto out) {
      using Fp8 = typename decltype(out)::type;
      parallel_for(tile_rows * tile_cols, kElementsPerThread / (kScaleBlock * kScaleBlock),
                   [&](int64_t first, int64_t last) {
                     for (int64_t i = first; i < last; ++i)
                       quantize_tile<In, Fp8>(args, Tile(i / tile_cols, i % tile_cols, x));
                   });
    });
  });
  if (args.dbias) column_sum(args.dbias, x);
  clear_padding(args.rowwise, args.blocks);
  clear_padding(args.columnwise, args.blocks);
}

}  // namespace te::cpu
