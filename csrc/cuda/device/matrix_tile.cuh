// Which part of a row-major matrix a thread works on, where 256 threads share a tile of 128 x 128
// elements and each has a block of 8 x 8: half a warp then reads 128 neighbouring elements.
#pragma once

#include <cstdint>

#include "cuda/tile_layout.h"

namespace te::cuda {

constexpr int kTile = 128;
constexpr int kTileThreads = 256;
constexpr int kOctetsPerRow = kTile / 8;
static_assert(kTile / 8 * kOctetsPerRow == kTileThreads);

struct TileBlock {
  int64_t start;   // index of the tile's first element
  int pitch;       // elements from row to row
  int rows, cols;  // rows and columns of the tile that exist
  int row, col;    // first row and column of the thread's block, in the tile

  __device__ __forceinline__ TileBlock(TilePlace tile, int64_t matrix_rows, int matrix_cols)
      : TileBlock(tile, matrix_rows, matrix_cols, matrix_cols) {}
  __device__ __forceinline__ TileBlock(TilePlace tile, int64_t matrix_rows, int matrix_cols,
                                       int row_pitch)
      : start(int64_t{tile.row} * kTile * row_pitch + tile.col * kTile),
        pitch(row_pitch),
        rows(static_cast<int>(min(matrix_rows - int64_t{tile.row} * kTile, int64_t{kTile}))),
        cols(min(matrix_cols - tile.col * kTile, kTile)),
        row(static_cast<int>(threadIdx.x / kOctetsPerRow * 8)),
        col(static_cast<int>(threadIdx.x % kOctetsPerRow * 8)) {}

  // Row i of the block, to read from. Beyond the end of the matrix it is the last row, or starts at
  // the last `width` columns. So reads need no branch and find no value that is not in the matrix,
  // and results from there are never stored.
  template <class T>
  __device__ __forceinline__ const T* row_or_last(const T* matrix, int i, int width) const {
    // In bytes, so that each row costs one wide multiply-add.
    const int row_bytes = pitch * static_cast<int>(sizeof(T));
    const auto* tile = reinterpret_cast<const char*>(matrix + start + min(col, cols - width));
    return reinterpret_cast<const T*>(tile + int64_t{min(row + i, rows - 1)} * row_bytes);
  }
  template <class T>
  __device__ __forceinline__ T* row_of(T* matrix, int i) const {
    return matrix + start + col + int64_t{row + i} * pitch;
  }
  __device__ __forceinline__ bool has_row(int i) const { return row + i < rows; }
  // The number of columns from the block's first to the end of the tile; 0 or less if the block
  // lies outside.
  __device__ __forceinline__ int width() const { return cols - col; }
};

// Whether the grid and the row lengths, which are 32-bit numbers, stay within their limits.
inline bool tiles_can_walk(const TileWalk& walk, int64_t cols) {
  return cols < (1 << 29) && walk.grid_y() <= 65535;
}

}  // namespace te::cuda
