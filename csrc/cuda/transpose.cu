// Transpose of one-byte codes: the tiles of quantize without the arithmetic.
#include "ops/transpose.h"

#include "cuda/device/dependent_launch.cuh"
#include "cuda/device/matrix_tile.cuh"
#include "cuda/device/tile_transpose.cuh"
#include "cuda/device/vector.cuh"

namespace te::cuda {
namespace {

using Tile = CodeTile<kTile, kTile>;

static_assert(kTile == kScaleBlock);

struct TransposeTiles {
  const uint8_t* x;
  int64_t rows;
  int cols;
  TileWalk walk;
  uint8_t* out;
  int64_t pitch;        // from a row of out to the next
  const float* scales;  // of tiles
  float* out_scales;
  ScaleGrid grid, out_grid;
};

// Stores the scale of a tile at its transposed place. Threads of the last tile of a column also
// clear the padding after it.
__device__ __forceinline__ void transpose_scale(const TransposeTiles& args, TilePlace at) {
  const int i = static_cast<int>(threadIdx.x);
  const bool last = at.row == args.grid.rows - 1;
  if (i == 0 || (last && i < 4 && at.row + i < args.out_grid.cols))
    args.out_scales[at.col * args.out_grid.cols + at.row + i] =
        i == 0 ? args.scales[at.row * args.grid.cols + at.col] : 0.0f;
}

template <bool kWide>
__device__ __forceinline__ uint2 load_row(const uint8_t* x, const TileBlock& block, int i) {
  if constexpr (kWide) return __ldcs(reinterpret_cast<const uint2*>(block.row_or_last(x, i, 8)));
  const uint8_t* from = block.row_or_last(x, i, 1);
  const int last = max(0, block.width() - 1);
  uint32_t words[2] = {};
#pragma unroll
  for (int j = 0; j < 8; ++j) words[j / 4] |= uint32_t{from[min(j, last)]} << (8 * (j % 4));
  return {words[0], words[1]};
}

template <bool kWide, bool kScales>
__global__ void __launch_bounds__(kTileThreads) transpose_kernel(const TransposeTiles args) {
  follow_previous_kernel();
  __shared__ alignas(16) uint8_t memory[Tile::kBytes];
  const Tile tile(memory);
  const TilePlace at = args.walk.at(blockIdx.x, blockIdx.y);
  if (!args.walk.has(at)) return;
  if constexpr (kScales) transpose_scale(args, at);
  const TileBlock block(at, args.rows, args.cols);
  CodeBlock codes;
#pragma unroll
  for (int i = 0; i < 8; ++i) codes.rows[i] = load_row<kWide>(args.x, block, i);
  tile.put(block.row, block.col, codes);
  __syncthreads();
  tile.store<kTileThreads>(target_of(args.out, args.pitch, at, block));
}

}  // namespace

void transpose(const TransposeArgs& args, Stream stream) {
  const TensorView& x = args.x;
  if (x.numel() == 0) return;
  const DeviceGuard guard(x.device);
  const TileWalk walk(ceil_div(x.rows(), kTile), ceil_div(x.cols(), kTile), false);
  require(tiles_can_walk(walk, x.cols()), Kind::Unsupported, "transpose",
          "expected fewer than 2^29 columns and 2^26 rows, got ", x);
  const TransposeTiles tiles{.x = x.ptr<uint8_t>(),
                             .rows = x.rows(),
                             .cols = static_cast<int>(x.cols()),
                             .walk = walk,
                             .out = args.out.ptr<uint8_t>(),
                             .pitch = transpose_pitch(args),
                             .scales = args.scales.ptr<float>(),
                             .out_scales = args.out_scales.ptr<float>(),
                             .grid = scale_grid(ScaleBlocks::Squares, x.rows(), x.cols()),
                             .out_grid = scale_grid(ScaleBlocks::Squares, x.cols(), x.rows())};
  const dim3 grid(static_cast<unsigned>(walk.grid_x()), static_cast<unsigned>(walk.grid_y()));
  dispatch_bool(x.cols() % 8 == 0 && is_aligned(x.data, 8), [&](auto wide) {
    dispatch_bool(static_cast<bool>(args.scales), [&](auto scales) {
      launch_dependent(transpose_kernel<wide(), scales()>, grid, kTileThreads, 0, stream_of(stream),
                       tiles);
    });
  });
}

}  // namespace te::cuda
