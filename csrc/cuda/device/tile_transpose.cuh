// Transposed stores of FP8 codes: how a block of threads that owns a [kRows x kCols] tile writes
// its columns as whole lines of the transposed matrix.
//
//   __shared__ alignas(16) uint8_t memory[CodeTile<128, 128>::kBytes];
//   CodeTile<128, 128> tile(memory);
//   CodeBlock codes;                               // 8 x 8 codes in registers: rows[i] = row i
//   codes.rows[i] = encode8<Fp8>(value, scale);    // also what the row-wise output gets
//   tile.put(row, col, codes);                     // row, col: within the tile, multiples of 8
//   __syncthreads();                               // once every block of the tile has been put
//   tile.store<kThreads>({.to = out + first_col * pitch + first_row, .pitch = pitch, ...});
//
// A warp's put has no bank conflicts if the lanes of each half warp own 16 neighbouring column
// groups of one row block (or any 16 groups that differ modulo 16). To reuse the tile, call
// __syncthreads after store. Blocks of rows or columns beyond the matrix may be left out or hold
// anything: store() does not write them.
#pragma once

#include <cstdint>

#include "cuda/device/matrix_tile.cuh"
#include "cuda/tile_layout.h"

namespace te::cuda {

struct CodeBlock {
  uint2 rows[8];
};

// Transposes the 4 x 4 bytes of a, b, c and d.
__device__ __forceinline__ void transpose_4x4(uint32_t& a, uint32_t& b, uint32_t& c, uint32_t& d) {
  const uint32_t ab01 = __byte_perm(a, b, 0x5140), ab23 = __byte_perm(a, b, 0x7362);
  const uint32_t cd01 = __byte_perm(c, d, 0x5140), cd23 = __byte_perm(c, d, 0x7362);
  a = __byte_perm(ab01, cd01, 0x5410);
  b = __byte_perm(ab01, cd01, 0x7632);
  c = __byte_perm(ab23, cd23, 0x5410);
  d = __byte_perm(ab23, cd23, 0x7632);
}

__device__ __forceinline__ CodeBlock transposed(const CodeBlock& block) {
  uint32_t x[8], y[8];  // left and right halves of the rows
#pragma unroll
  for (int i = 0; i < 8; ++i) {
    x[i] = block.rows[i].x;
    y[i] = block.rows[i].y;
  }
  transpose_4x4(x[0], x[1], x[2], x[3]);
  transpose_4x4(x[4], x[5], x[6], x[7]);
  transpose_4x4(y[0], y[1], y[2], y[3]);
  transpose_4x4(y[4], y[5], y[6], y[7]);
  CodeBlock result;
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    result.rows[i] = {x[i], x[i + 4]};
    result.rows[i + 4] = {y[i], y[i + 4]};
  }
  return result;
}

// Where a tile goes in the transposed matrix, and how much of it exists.
struct TileTarget {
  uint8_t* to;    // code (0, 0) of the tile
  int64_t pitch;  // the distance between columns: the rows of the whole matrix, or more
  int rows;       // rows that exist from the tile's first on, at least those of the tile
  int cols;
  bool wide;  // `to` and `pitch` are multiples of 16
};

// The target of a tile of matrix_tile.cuh.
__device__ __forceinline__ TileTarget target_of(uint8_t* out, int64_t pitch, TilePlace at,
                                                const TileBlock& block) {
  return {out + int64_t{at.col} * kTile * pitch + int64_t{at.row} * kTile, pitch, block.rows,
          block.cols, (pitch | reinterpret_cast<intptr_t>(out)) % 16 == 0};
}

// Stores the first `count` of 16 codes byte by byte, where they are not aligned.
__device__ __forceinline__ void store_bytes(uint8_t* to, const uint4& codes, int64_t count) {
  const uint32_t words[4] = {codes.x, codes.y, codes.z, codes.w};
#pragma unroll
  for (int i = 0; i < 16; ++i)
    if (i < count) to[i] = static_cast<uint8_t>(words[i / 4] >> (8 * (i % 4)));
}

template <int kRows, int kCols>
class CodeTile {
  using Layout = CodeTileLayout<kRows>;
  static_assert(kCols % 8 == 0, "the swizzle permutes eight columns at a time");

 public:
  static constexpr int kBytes = kRows * kCols;

  // `memory`: shared, 16-byte aligned, kBytes long.
  __device__ __forceinline__ explicit CodeTile(void* memory) : memory_(memory) {}

  __device__ __forceinline__ void put(int row, int col, const CodeBlock& block) const {
    const CodeBlock columns = transposed(block);
    // Layout::unit(row / 8, col + j), with all but the permuted low bits as constants.
    const int key = Layout::key(col), part = row / 8;
    uint2* units = static_cast<uint2*>(memory_) + col * Layout::kUnits;
#pragma unroll
    for (int j = 0; j < 8; ++j) {
      constexpr int kPermuted = 15;
      const int unit = j * Layout::kUnits;
      units[(unit & ~kPermuted) + (((unit & kPermuted) + part) ^ key)] = columns.rows[j];
    }
  }

  // Called by `kThreads` threads, numbered from 0; kRows / 16 neighbours write one column.
  template <int kThreads>
  __device__ __forceinline__ void store(const TileTarget& target,
                                        unsigned thread = threadIdx.x) const {
    constexpr int kTurnCols = kThreads / kParts, kTurns = kCols / kTurnCols;
    static_assert(kTurns * kTurnCols * kParts == kCols * kParts && kTurnCols * kParts == kThreads,
                  "every thread writes as many parts");
    const int part = static_cast<int>(thread % kParts), col = static_cast<int>(thread / kParts);
    uint8_t* const to = target.to + col * target.pitch + part * 16;
    const int cols = part * 16 < target.rows ? target.cols - col : 0;  // that exist from `col` on
    if (target.wide) {
      uint4 codes[kTurns];
#pragma unroll
      for (int turn = 0; turn < kTurns; ++turn) codes[turn] = part_at(part, col + turn * kTurnCols);
#pragma unroll
      for (int turn = 0; turn < kTurns; ++turn)
        if (turn * kTurnCols < cols)
          *reinterpret_cast<uint4*>(to + turn * kTurnCols * target.pitch) = codes[turn];
    } else {
#pragma unroll 1
      for (int turn = 0; turn < kTurns; ++turn)
        if (turn * kTurnCols < cols)
          store_bytes(to + turn * kTurnCols * target.pitch, part_at(part, col + turn * kTurnCols),
                      target.rows - part * 16);
    }
  }

 private:
  static constexpr int kParts = kRows / 16;  // pieces of 16 codes per column

  __device__ __forceinline__ uint4 part_at(int part, int col) const {
    const uint4 codes = static_cast<const uint4*>(memory_)[Layout::pair(part, col)];
    if (!Layout::swapped(col)) return codes;
    return {codes.z, codes.w, codes.x, codes.y};
  }

  void* memory_;
};

}  // namespace te::cuda
