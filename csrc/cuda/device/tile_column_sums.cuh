// The sums of a tile's columns, whose values are in registers.
#pragma once

#include "cuda/device/matrix_tile.cuh"
#include "cuda/device/pack_io.cuh"

namespace te::cuda {

// In shared memory. Every warp leaves the sums of its 16 rows; after a barrier, each thread adds up
// one column.
template <int kOutputs>
struct TileColumnSums {
  static constexpr int kWarps = kTileThreads / 32;
  float part[kOutputs][kWarps][kTile];

  __device__ __forceinline__ void leave(int k, int col, float (&sums)[8]) {
#pragma unroll
    for (int j = 0; j < 8; ++j) sums[j] += __shfl_xor_sync(0xffffffffu, sums[j], kOctetsPerRow);
    if (threadIdx.x % 32 >= kOctetsPerRow) return;
    float* to = part[k][threadIdx.x / 32] + col;
    store_pack(to, Pack<float, 4>{sums[0], sums[1], sums[2], sums[3]});
    store_pack(to + 4, Pack<float, 4>{sums[4], sums[5], sums[6], sums[7]});
  }
  // `to`: the sum of the tile's first column in the first output.
  __device__ __forceinline__ void store(float* to, int cols, int tile_cols) const {
    const int k = static_cast<int>(threadIdx.x) / kTile, j = static_cast<int>(threadIdx.x) % kTile;
    if (k >= kOutputs || j >= tile_cols) return;
    float sum = 0.0f;
#pragma unroll
    for (int warp = 0; warp < kWarps; ++warp) sum += part[k][warp][j];
    to[k * cols + j] = sum;
  }
};

}  // namespace te::cuda
