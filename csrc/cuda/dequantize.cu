// Dequantises FP8 codes. With one scale for the tensor, threads go through it in packs of codes
// whose values fill 16 bytes. With block scales, a block of threads takes a tile of 128 x 128
// codes.
#include "ops/dequantize.h"

#include <algorithm>

#include "cuda/device/dependent_launch.cuh"
#include "cuda/device/float8.cuh"
#include "cuda/device/matrix_tile.cuh"
#include "cuda/device/vector.cuh"

namespace te::cuda {
namespace {

constexpr int kThreads = 256;
constexpr int kInFlight = 4;  // packs that a thread loads before it uses the first

template <class Out>
struct DequantizeStream {
  static constexpr int kValues = 16 / static_cast<int>(sizeof(Out));
  using Codes = Pack<uint16_t, kValues / 2>;  // two to a word, as they are decoded

  const uint8_t* codes;
  const float* scale_inverse;
  Out* x;
  int64_t count;
  int64_t packs;  // packs that are read and written whole; 0 if not aligned for it
};

template <class Fp8, class Out>
__device__ __forceinline__ auto decode_pack(const typename DequantizeStream<Out>::Codes& codes,
                                            float scale_inverse) {
  Pack<Out, DequantizeStream<Out>::kValues> values;
#pragma unroll
  for (int i = 0; i < DequantizeStream<Out>::kValues; i += 2) {
    const float2 pair = decode2<Fp8>(codes.at[i / 2]);
    values.at[i] = Out(pair.x * scale_inverse);
    values.at[i + 1] = Out(pair.y * scale_inverse);
  }
  return values;
}

template <class Fp8, class Out>
__global__ void __launch_bounds__(kThreads) dequantize_kernel(const DequantizeStream<Out> args) {
  follow_previous_kernel();
  using Codes = typename DequantizeStream<Out>::Codes;
  constexpr int kValues = DequantizeStream<Out>::kValues;
  const int64_t first = int64_t{blockIdx.x} * kThreads * kInFlight + threadIdx.x;
  Codes codes[kInFlight];
#pragma unroll
  for (int k = 0; k < kInFlight; ++k)
    if (const int64_t pack = first + k * kThreads; pack < args.packs)
      codes[k] = load_pack<uint16_t, kValues / 2>(
          reinterpret_cast<const uint16_t*>(args.codes + pack * kValues));
  const float scale_inverse = *args.scale_inverse;
#pragma unroll
  for (int k = 0; k < kInFlight; ++k)
    if (const int64_t pack = first + k * kThreads; pack < args.packs)
      store_pack(args.x + pack * kValues, decode_pack<Fp8, Out>(codes[k], scale_inverse));
  const int64_t stride = int64_t{gridDim.x} * kThreads;
  for (int64_t i = args.packs * kValues + int64_t{blockIdx.x} * kThreads + threadIdx.x;
       i < args.count; i += stride)
    args.x[i] = Out(Fp8::decode(args.codes[i]) * scale_inverse);
}

// ---- Blocks ----

template <class Out>
struct DequantizeTiles {
  const uint8_t* codes;
  const float* inverses;
  ScaleGrid grid;
  Out* x;
  int64_t rows;
  int cols;
  TileWalk walk;
  bool wide;  // eight codes, and their values, are aligned
};

template <class Fp8, class Out>
__global__ void __launch_bounds__(kTileThreads)
    dequantize_tiles_kernel(const DequantizeTiles<Out> args) {
  follow_previous_kernel();
  const TilePlace at = args.walk.at(blockIdx.x, blockIdx.y);
  if (!args.walk.has(at)) return;
  const TileBlock block(at, args.rows, args.cols);
#pragma unroll
  for (int i = 0; i < 8; ++i) {
    if (!block.has_row(i) || block.width() <= 0) continue;
    const float inverse = args.inverses[args.grid.at(int64_t{at.row} * kTile + block.row + i,
                                                     int64_t{at.col} * kTile)];
    const uint8_t* from = block.row_of(args.codes, i);
    Out* to = block.row_of(args.x, i);
    if (args.wide) {
      const uint2 codes = *reinterpret_cast<const uint2*>(from);
      float values[8];
#pragma unroll
      for (int j = 0; j < 8; j += 2) {
        const float2 pair = decode2<Fp8>((j < 4 ? codes.x : codes.y) >> (8 * (j % 4)) & 0xffffu);
        values[j] = pair.x * inverse;
        values[j + 1] = pair.y * inverse;
      }
      store_octet(to, values);
    } else {
      for (int j = 0; j < min(8, block.width()); ++j) to[j] = Out(Fp8::decode(from[j]) * inverse);
    }
  }
}

template <class Fp8, class Out>
void dequantize_tiles(const DequantizeArgs& args, cudaStream_t stream) {
  const int64_t rows = args.q.rows(), cols = args.q.cols();
  const TileWalk walk(ceil_div(rows, kTile), ceil_div(cols, kTile), false);
  require(tiles_can_walk(walk, cols), Kind::Unsupported, "dequantize",
          "expected fewer than 2^29 columns and 2^26 rows, got ", args.q);
  const dim3 grid(static_cast<unsigned>(walk.grid_x()), static_cast<unsigned>(walk.grid_y()));
  launch_dependent(dequantize_tiles_kernel<Fp8, Out>, grid, kTileThreads, 0, stream,
                   DequantizeTiles<Out>{.codes = args.q.ptr<uint8_t>(),
                                        .inverses = args.scales.ptr<float>(),
                                        .grid = scale_grid(args.blocks, rows, cols),
                                        .x = args.x.ptr<Out>(),
                                        .rows = rows,
                                        .cols = static_cast<int>(cols),
                                        .walk = walk,
                                        .wide = cols % 8 == 0 && is_aligned(args.q.data, 8) &&
                                                is_aligned(args.x.data, 16)});
}

}  // namespace

void dequantize(const DequantizeArgs& args, Stream stream) {
  const int64_t count = args.q.numel();
  if (count == 0) return;
  const DeviceGuard guard(args.q.device);
  dispatch_fp8(args.dtype, "dequantize", [&](auto in) {
    dispatch_high_precision(args.x.dtype, "dequantize", [&](auto out) {
      using Fp8 = typename decltype(in)::type;
      using Out = typename decltype(out)::type;
      if (args.blocks != ScaleBlocks::Whole)
        return dequantize_tiles<Fp8, Out>(args, stream_of(stream));
      constexpr int kValues = DequantizeStream<Out>::kValues;
      const bool wide = is_aligned(args.q.data, kValues) && is_aligned(args.x.data, 16);
      const int64_t blocks = ceil_div(count, int64_t{kThreads} * kInFlight * kValues);
      launch_dependent(dequantize_kernel<Fp8, Out>, static_cast<unsigned>(blocks), kThreads, 0,
                       stream_of(stream),
                       DequantizeStream<Out>{.codes = args.q.ptr<uint8_t>(),
                                             .scale_inverse = args.scales.ptr<float>(),
                                             .x = args.x.ptr<Out>(),
                                             .count = count,
                                             .packs = wide ? count / kValues : 0});
    });
  });
}

}  // namespace te::cuda
