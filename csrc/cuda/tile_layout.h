// Index maps of tiled kernels: which tile a block takes, and where a tile keeps its codes in shared
// memory. Plain arithmetic without CUDA, so that a CPU test can enumerate it
// (tile_layout_test.cpp).
#pragma once

#include <cstdint>

#include "core/hd.h"

namespace te::cuda {

struct TilePlace {
  int64_t row, col;  // counted in tiles
};

// Blocks walk the matrix in bands of `band` tile rows, down each band's columns: blocks that run at
// the same time then read long pieces of rows and write long pieces of transposed rows.
struct TileWalk {
  int64_t rows = 0, cols = 0;  // of the matrix, counted in tiles
  int64_t band = 8;

  TE_HD TilePlace at(int64_t block) const {
    const int64_t first = block / (band * cols) * band;
    const int64_t height = rows - first < band ? rows - first : band;
    const int64_t inside = block - first * cols;
    return {first + inside % height, inside / height};
  }
};

// A tile of one-byte codes in shared memory, column after column, `kRows` codes each, in units of
// eight. Within every 16 units (128 bytes: all banks) positions are permuted by an XOR with the
// column group, so that threads that own neighbouring column groups of one row block meet
// different banks when they write, and a whole line is read back at once.
template <int kRows>
struct CodeTileLayout {
  static_assert(kRows % 16 == 0, "columns are read back 16 bytes at a time");
  static constexpr int kUnits = kRows / 8;  // per column

  TE_HD static int key(int col) { return col / 8 % 16; }
  // Where codes [8 * row_block, 8 * row_block + 8) of a column are, counted in units.
  TE_HD static int unit(int row_block, int col) { return (col * kUnits + row_block) ^ key(col); }
  // Where codes [16 * part, 16 * part + 16) of a column are, counted in pairs of units; the two
  // units of the pair have changed places where `swapped`.
  TE_HD static int pair(int part, int col) { return unit(2 * part, col) / 2; }
  TE_HD static bool swapped(int col) { return key(col) % 2 != 0; }
};

}  // namespace te::cuda
