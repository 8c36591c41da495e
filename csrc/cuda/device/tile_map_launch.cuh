// Launches of the tile map of one matrix.
#pragma once

#include "cuda/device/dependent_launch.cuh"
#include "cuda/device/tile_map.cuh"
#include "cuda/launch.h"

namespace te::cuda {

template <class In, class Function, bool kWide, bool kMoments>
__global__ void __launch_bounds__(kTileThreads, blocks_of<In, Function>(kWide, kMoments))
    tile_map_kernel(const TileMap<Function> map) {
  follow_previous_kernel();
  const TilePlace at = map.walk.at(blockIdx.x, blockIdx.y);
  if (map.walk.has(at)) map_tile<In, Function, kWide, kMoments>(map, at);
}

// Writes the scales of an empty matrix.
static __global__ void empty_map_kernel(QuantizedSink quantized, CurrentScaleSink current) {
  follow_previous_kernel();
  if (quantized) quantized.scale_used(true);
  if (current) current.finish(0.0f, 1);
}

template <class Function>
bool can_go_wide(const TileMap<Function>& map) {
  bool wide =
      map.cols % 8 == 0 && is_aligned(map.plain, 16) && is_aligned(map.quantized.rowwise, 8);
  for (const void* input : map.inputs) wide = wide && is_aligned(input, 16);
  wide = wide && is_aligned(map.again.plain, 16);
  return wide;
}

// Row lengths in bytes are 32-bit numbers in the kernel.
inline int tile_map_cols(int64_t cols, std::string_view op) {
  require(cols < (1 << 28), Kind::Unsupported, op, "expected fewer than 2^28 columns, got ", cols);
  return static_cast<int>(cols);
}

// Launches the map. Returns whether it takes the moments; if not, the caller has to. The moments of
// an empty matrix are taken by doing nothing.
template <class Function>
bool launch_tile_map(TileMap<Function> map, DType dtype, const MomentsSink& moments,
                     std::string_view op, cudaStream_t stream) {
  map.walk = TileWalk(ceil_div(map.rows, kTile), ceil_div(map.cols, kTile), map.backwards);
  require(tiles_can_walk(map.walk, map.cols), Kind::Unsupported, op,
          "expected fewer than 2^26 rows, got ", map.rows);
  const dim3 grid(static_cast<unsigned>(map.walk.grid_x()),
                  static_cast<unsigned>(map.walk.grid_y()));
  map.moments = tile_moments_sink_of(moments, int64_t{map.walk.rows} * map.walk.cols,
                                     map.rows * map.cols * Function::kOutputs);
  bool taken = false;
  dispatch_high_precision(dtype, op, [&](auto tag) {
    using In = typename decltype(tag)::type;
    if (map.rows == 0 || map.cols == 0) {
      taken = true;
      launch_dependent(empty_map_kernel, 1, 1, 0, stream, map.quantized, map.current);
      return;
    }
    dispatch_bool(can_go_wide(map), [&](auto wide) {
      const auto launch = [&](auto takes) {
        taken = takes();
        launch_dependent(tile_map_kernel<In, Function, wide(), takes()>, grid, kTileThreads, 0,
                         stream, map);
      };
      if constexpr (Function::kAgain || DependsOnPlace<Function>)
        launch(std::false_type{});  // such functions take no moments
      else
        dispatch_moments<In, wide()>(static_cast<bool>(moments), launch);
    });
  });
  return taken;
}

}  // namespace te::cuda
