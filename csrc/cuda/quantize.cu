// Two kernels. Row-wise codes alone are a stream of values; everything else goes by tiles of
// 128 x 128: each thread reads eight neighbours of eight rows (all loads in flight before the first
// use), stores the row-wise codes from registers, and the transposed ones through shared memory.
#include "ops/quantize.h"

#include <algorithm>

#include "cuda/column_sum.h"
#include "cuda/device/dependent_launch.cuh"
#include "cuda/device/float8.cuh"
#include "cuda/device/matrix_tile.cuh"
#include "cuda/device/quantized_sink.cuh"
#include "cuda/device/reduce.cuh"
#include "cuda/device/tile_transpose.cuh"
#include "cuda/device/vector.cuh"
#include "cuda/launch.h"

namespace te::cuda {
namespace {

constexpr int kThreads = kTileThreads;
constexpr int kWarps = kThreads / 32;

// ---- A stream of values ----

constexpr int kInFlight = 4;  // octets that a thread loads before it uses the first

template <class In>
struct CastArgs {
  const In* x;
  int64_t count;
  int64_t octets;  // that are read and written whole; 0 where memory is not aligned for it
  QuantizedSink out;
};

template <class Fp8, class In>
__device__ __forceinline__ uint2 encode_octet(const Octet<In>& x, float scale, float& amax) {
  float value[8];
#pragma unroll
  for (int i = 0; i < 8; ++i) {
    value[i] = x[i];
    amax = fmaxf(amax, fabsf(value[i]));
  }
  return encode8<Fp8>(value, scale);
}

template <class In, class Fp8>
__global__ void __launch_bounds__(kThreads) cast_kernel(const CastArgs<In> args) {
  __shared__ BlockAmax<kWarps> block_amax;
  const int64_t first = static_cast<int64_t>(blockIdx.x) * kThreads * kInFlight + threadIdx.x;
  Octet<In> x[kInFlight];
#pragma unroll
  for (int k = 0; k < kInFlight; ++k)
    if (first + k * kThreads < args.octets) x[k] = load_octet(args.x + 8 * (first + k * kThreads));
  const float scale = args.out.scale_used(blockIdx.x == 0 && threadIdx.x == 0);
  float amax = 0.0f;
#pragma unroll
  for (int k = 0; k < kInFlight; ++k)
    if (const int64_t octet = first + k * kThreads; octet < args.octets)
      reinterpret_cast<uint2*>(args.out.rowwise)[octet] = encode_octet<Fp8>(x[k], scale, amax);
  const int64_t stride = static_cast<int64_t>(gridDim.x) * kThreads;
  for (int64_t i = 8 * args.octets + blockIdx.x * kThreads + threadIdx.x; i < args.count;
       i += stride) {
    const float value = static_cast<float>(args.x[i]);
    args.out.rowwise[i] = Fp8::encode(value * scale);
    amax = fmaxf(amax, fabsf(value));
  }
  if (!args.out.amax) return;
  block_amax.leave(amax);
  __syncthreads();
  if (threadIdx.x == 0) atomic_max(args.out.amax, block_amax.total());
}

// Also the launch for an empty tensor, which writes the scales and nothing else.
template <class In, class Fp8>
void cast(const QuantizeArgs& args, cudaStream_t stream) {
  const int64_t count = args.x.numel();
  const bool wide = is_aligned(args.x.data, 16) && is_aligned(args.out.rowwise.data, 8);
  const int64_t octets = wide ? count / 8 : 0;
  const int64_t blocks = ceil_div(wide ? octets : ceil_div(count, 8), kThreads * kInFlight);
  cast_kernel<In, Fp8>
      <<<static_cast<unsigned>(std::max<int64_t>(1, blocks)), kThreads, 0, stream>>>(
          {args.x.ptr<In>(), count, octets, sink_of(args.out)});
}

// ---- Tiles ----

using Tile = CodeTile<kTile, kTile>;

template <class In>
struct TileArgs {
  const In* x;
  int64_t rows;
  int cols;
  TileWalk walk;
  QuantizedSink out;
  float* column_parts;  // [tile rows, cols]
};

template <bool kWide, class In>
__device__ __forceinline__ Octet<In> load_row(const In* x, const TileBlock& block, int i) {
  if constexpr (kWide) return load_octet(block.row_or_last(x, i, 8));
  return gather_octet(block.row_or_last(x, i, 1), max(0, block.width() - 1));
}

template <bool kWide>
__device__ __forceinline__ void store_row(uint8_t* to, uint2 codes, int count) {
  if constexpr (kWide) {
    *reinterpret_cast<uint2*>(to) = codes;
  } else {
#pragma unroll
    for (int j = 0; j < 8; ++j)
      if (j < count) to[j] = static_cast<uint8_t>((j < 4 ? codes.x : codes.y) >> (8 * (j % 4)));
  }
}

template <class In>
__device__ __forceinline__ void add_to(float (&sums)[8], const Octet<In>& x) {
#pragma unroll
  for (int j = 0; j < 8; ++j) sums[j] += x[j];
}

// Leaves the sums of the tile's columns in `shared`, one row per warp.
__device__ __forceinline__ void leave_column_sums(float (&sums)[8], int col,
                                                  float (*shared)[kTile]) {
#pragma unroll
  for (int j = 0; j < 8; ++j) sums[j] += __shfl_xor_sync(0xffffffffu, sums[j], kOctetsPerRow);
  if (threadIdx.x % 32 >= kOctetsPerRow) return;
  float* to = shared[threadIdx.x / 32] + col;
  store_pack(to, Pack<float, 4>{sums[0], sums[1], sums[2], sums[3]});
  store_pack(to + 4, Pack<float, 4>{sums[4], sums[5], sums[6], sums[7]});
}

// Blocks per multiprocessor: what the registers allow without spilling.
template <class In>
constexpr int occupancy(bool dbias, bool wide) {
  if (!wide) return 1;
  return dbias || sizeof(In) == 4 ? 3 : 4;
}

template <class In, class Fp8, bool kDbias, bool kWide>
__global__ void __launch_bounds__(kThreads, occupancy<In>(kDbias, kWide))
    tile_kernel(const TileArgs<In> args) {
  __shared__ alignas(16) uint8_t memory[Tile::kBytes];
  __shared__ alignas(16) float column_sums[kDbias ? kWarps : 1][kTile];
  __shared__ BlockAmax<kWarps> block_amax;
  const Tile tile(memory);
  const TilePlace at = args.walk.at(blockIdx.x, blockIdx.y);
  if (!args.walk.has(at)) return;
  const TileBlock block(at, args.rows, args.cols);
  if constexpr (kDbias) let_next_kernel_start();  // the sum of the parts

  constexpr int kRowsInFlight = kWide ? 16 / static_cast<int>(sizeof(In)) : 2;
  CodeBlock codes;
  float sums[8] = {}, amax = 0.0f, scale = 0.0f;
#pragma unroll
  for (int first = 0; first < 8; first += kRowsInFlight) {
    Octet<In> x[kRowsInFlight];
#pragma unroll
    for (int i = 0; i < kRowsInFlight; ++i) x[i] = load_row<kWide>(args.x, block, first + i);
    if (first == 0) scale = args.out.scale_used(at.row == 0 && at.col == 0 && threadIdx.x == 0);
#pragma unroll
    for (int i = 0; i < kRowsInFlight; ++i) {
      codes.rows[first + i] = encode_octet<Fp8>(x[i], scale, amax);
      if constexpr (kDbias) {
        if (block.has_row(first + i)) add_to(sums, x[i]);
      }
    }
  }

  if (args.out.rowwise && block.width() > 0) {
#pragma unroll
    for (int i = 0; i < 8; ++i)
      if (block.has_row(i))
        store_row<kWide>(block.row_of(args.out.rowwise, i), codes.rows[i], block.width());
  }
  if (args.out.columnwise) tile.put(block.row, block.col, codes);
  if constexpr (kDbias) leave_column_sums(sums, block.col, column_sums);
  block_amax.leave(amax);
  __syncthreads();
  if (args.out.columnwise)
    tile.store<kThreads>(target_of(args.out.columnwise, args.rows, at, block));
  if (threadIdx.x == 0 && args.out.amax) atomic_max(args.out.amax, block_amax.total());
  if constexpr (kDbias) {
    const int j = static_cast<int>(threadIdx.x);
    if (j >= block.cols) return;
    float sum = 0.0f;
#pragma unroll
    for (int warp = 0; warp < kWarps; ++warp) sum += column_sums[warp][j];
    args.column_parts[int64_t{at.row} * args.cols + at.col * kTile + j] = sum;
  }
}

template <class In, class Fp8>
void by_tiles(const QuantizeArgs& args, cudaStream_t stream) {
  const TensorView& x = args.x;
  const bool amax_has_read_x = !args.out.scale;  // current scaling
  const TileWalk walk(ceil_div(x.rows(), kTile), ceil_div(x.cols(), kTile), amax_has_read_x);
  require(tiles_can_walk(walk, x.cols()), Kind::Unsupported, "quantize",
          "expected fewer than 2^29 columns and 2^26 rows, got ", x);
  const TileArgs<In> tiles{.x = x.ptr<In>(),
                           .rows = x.rows(),
                           .cols = static_cast<int>(x.cols()),
                           .walk = walk,
                           .out = sink_of(args.out),
                           .column_parts = args.workspace.ptr<float>()};
  const dim3 grid(static_cast<unsigned>(walk.grid_x()), static_cast<unsigned>(walk.grid_y()));
  const bool wide =
      x.cols() % 8 == 0 && is_aligned(x.data, 16) && is_aligned(args.out.rowwise.data, 8);
  dispatch_bool(static_cast<bool>(args.dbias), [&](auto dbias) {
    dispatch_bool(wide, [&](auto aligned) {
      tile_kernel<In, Fp8, dbias(), aligned()><<<grid, kThreads, 0, stream>>>(tiles);
    });
  });
}

}  // namespace

void quantize(const QuantizeArgs& args, Stream on) {
  const DeviceGuard guard(args.x.device);
  const cudaStream_t stream = stream_of(on);
  const bool needs_tiles = args.out.columnwise || args.dbias;
  dispatch_high_precision(args.x.dtype, "quantize", [&](auto in) {
    dispatch_fp8(args.out.dtype, "quantize", [&](auto out) {
      using In = typename decltype(in)::type;
      using Fp8 = typename decltype(out)::type;
      if (needs_tiles && args.x.numel() != 0) return by_tiles<In, Fp8>(args, stream);
      cast<In, Fp8>(args, stream);
    });
  });
  check_launch("quantize");
  if (args.dbias)
    reduce_column_parts(args.workspace.ptr<float>(), ceil_div(args.x.rows(), kTile), args.x.cols(),
                        args.dbias, stream);
}

}  // namespace te::cuda
