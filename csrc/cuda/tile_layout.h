// Index maps of tiled kernels: which tile a block takes, and where a tile keeps its codes in shared
// memory. Plain arithmetic without CUDA, so that a CPU test can enumerate it
// (tile_layout_test.cpp).
#pragma once

#include <cstdint>

#include "core/hd.h"

namespace te::cuda {

struct TilePlace {
  int row, col;  // counted in tiles
};

// Blocks walk the matrix in bands of up to eight tile rows, down each column of a band: blocks that
// run at the same time then read long pieces of rows and write long pieces of transposed rows. They
// walk backwards if the previous pass over the matrix went forwards, because its end is still in
// L2. The grid is (grid_x, grid_y); blocks below the last tile row have nothing to do.
struct TileWalk {
  int rows = 0, cols = 0;  // of the matrix, counted in tiles
  bool backwards = false;
  int band_log2 = 0;  // log2 of a band's rows, so that no block has to divide

  TileWalk() = default;
  TE_HD TileWalk(int64_t tile_rows, int64_t tile_cols, bool from_the_end)
      : rows(static_cast<int>(tile_rows)),
        cols(static_cast<int>(tile_cols)),
        backwards(from_the_end) {
    while (band_log2 < 3 && (1 << band_log2) < rows) ++band_log2;
  }
  TE_HD int64_t grid_x() const { return static_cast<int64_t>(cols) << band_log2; }
  TE_HD int64_t grid_y() const { return (rows + (1 << band_log2) - 1) >> band_log2; }

  TE_HD TilePlace at(unsigned x, unsigned y) const {
    const auto block = static_cast<int>(x), band = static_cast<int>(y);
    const int in_band = block & ((1 << band_log2) - 1);
    const TilePlace place{(band << band_log2) + in_band, block >> band_log2};
    return backwards ? TilePlace{rows - 1 - place.row, cols - 1 - place.col} : place;
  }
  TE_HD bool has(TilePlace place) const { return place.row >= 0 && place.row < rows; }
};

// A tile of one-byte codes in shared memory, stored by columns of `kRows` codes, in units of eight
// codes. Within every 16 units (128 bytes: all banks) positions are permuted by an XOR with the
// column group. So threads that own neighbouring column groups of one row block write to different
// banks, and a whole line is read back at once.
template <int kRows>
struct CodeTileLayout {
  static_assert(kRows % 16 == 0, "columns are read back 16 bytes at a time");
  static constexpr int kUnits = kRows / 8;  // per column

  TE_HD static int key(int col) { return (col >> 3) & 15; }
  // Where codes [8 * row_block, 8 * row_block + 8) of a column are, counted in units.
  TE_HD static int unit(int row_block, int col) { return (col * kUnits + row_block) ^ key(col); }
  // Where codes [16 * part, 16 * part + 16) of a column are, counted in pairs of units. If the
  // column is `swapped`, the two units of a pair are in reverse order.
  TE_HD static int pair(int part, int col) { return unit(2 * part, col) >> 1; }
  TE_HD static bool swapped(int col) { return (col & 8) != 0; }
};

}  // namespace te::cuda
