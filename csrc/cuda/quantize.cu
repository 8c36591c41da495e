// Casts to FP8 with one scale for the tensor. If only row-wise codes are asked for, the kernel goes
// through memory in order. Everything else is the tile map of the identity, over one matrix or
// many.
#include "ops/quantize.h"

#include <algorithm>

#include "cuda/column_sum.h"
#include "cuda/device/tensor_batch.cuh"
#include "cuda/device/tile_map_launch.cuh"

namespace te::cuda {
namespace {

constexpr int kThreads = 256;
constexpr int kWarps = kThreads / 32;

// ---- A stream of values ----

constexpr int kInFlight = 4;  // octets that a thread loads before it uses the first

template <class In>
struct CastArgs {
  const In* x;
  int64_t count;
  int64_t octets;  // octets that are read and written whole; 0 if not aligned
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
__global__ void __launch_bounds__(kThreads, blocks_sharing(0, 1, kThreads))
    cast_kernel(const CastArgs<In> args) {
  follow_previous_kernel();
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

template <class In, class Fp8>
void cast(const QuantizeArgs& args, cudaStream_t stream) {
  const int64_t count = args.x.numel();
  const bool wide = is_aligned(args.x.data, 16) && is_aligned(args.out.rowwise.data, 8);
  const int64_t octets = wide ? count / 8 : 0;
  const int64_t blocks = ceil_div(wide ? octets : ceil_div(count, 8), kThreads * kInFlight);
  launch_dependent(cast_kernel<In, Fp8>, static_cast<unsigned>(std::max<int64_t>(1, blocks)),
                   kThreads, 0, stream,
                   CastArgs<In>{args.x.ptr<In>(), count, octets, sink_of(args.out)});
}

// ---- Tiles ----

template <bool kDbias>
struct Identity {
  static constexpr int kInputs = 1, kOutputs = 1;
  static constexpr int kPitch(int) { return 1; }
  static constexpr bool kPlain = false, kColumnSums = kDbias, kCopies = true, kAgain = false;

  __device__ __forceinline__ void operator()(const float (&in)[1], float (&out)[1]) const {
    out[0] = in[0];
  }
};

// Casts by the tile map. Returns whether this has taken the moments.
template <bool kDbias>
bool by_tiles(const QuantizeArgs& args, cudaStream_t stream) {
  return launch_tile_map(
      TileMap<Identity<kDbias>>{.function = {},
                                .inputs = {args.x.data},
                                .rows = args.x.rows(),
                                .cols = tile_map_cols(args.x.cols(), "quantize"),
                                .backwards = !args.out.scale,  // amax has just read x
                                .quantized = sink_of(args.out),
                                .e5m2 = args.out.dtype == DType::Float8E5M2,
                                .column_parts = args.workspace.memory.ptr<float>()},
      args.x.dtype, args.moments, "quantize", stream);
}

// ---- Tiles of many matrices ----

// A thread of a tile has eight rows, so with fewer rows than that most threads have nothing to do.
constexpr int64_t kFewRows = 8;

struct Matrix {
  const void* x;
  int64_t rows;
  int cols;
  QuantizedSink out;
};

struct Matrices {
  TensorBatch<Matrix, 48> tensors;  // arguments of a kernel are at most 4 KiB
  bool e5m2;
  bool wide = true;  // all matrices allow wide accesses
};
static_assert(sizeof(Matrices) <= 4096);

using Copy = Identity<false>;

__host__ __device__ TileWalk walk_of(int64_t rows, int64_t cols) {
  return {(rows + kTile - 1) / kTile, (cols + kTile - 1) / kTile, false};
}

template <class In, bool kWide>
__global__ void __launch_bounds__(kTileThreads, blocks_of<In, Copy>(kWide, false))
    quantize_many_kernel(const __grid_constant__ Matrices matrices) {
  follow_previous_kernel();
  const int index = matrices.tensors.tensor_of(blockIdx.x);
  const Matrix& matrix = matrices.tensors.tensors[index];
  TileMap<Copy> map{.function = {},
                    .inputs = {matrix.x},
                    .rows = matrix.rows,
                    .cols = matrix.cols,
                    .walk = walk_of(matrix.rows, matrix.cols),
                    .quantized = matrix.out,
                    .e5m2 = matrices.e5m2};
  const unsigned block = blockIdx.x - matrices.tensors.first_block[index];
  const auto across = static_cast<unsigned>(map.walk.grid_x());
  const TilePlace at = map.walk.at(block % across, block / across);
  if (map.walk.has(at)) map_tile<In, Copy, kWide, false>(map, at);
}

}  // namespace

void quantize_many(const std::vector<QuantizeArgs>& all, Stream on) {
  constexpr const char* kOp = "quantize_many";
  const TensorView& like = all.front().x;
  const DeviceGuard guard(like.device);
  Matrices matrices{.tensors = {}, .e5m2 = all.front().out.dtype == DType::Float8E5M2};
  const auto launch = [&] {
    if (matrices.tensors.blocks == 0) return;
    dispatch_high_precision(like.dtype, kOp, [&](auto tag) {
      using In = typename decltype(tag)::type;
      dispatch_bool(matrices.wide, [&](auto wide) {
        launch_dependent(quantize_many_kernel<In, wide()>, matrices.tensors.blocks, kTileThreads, 0,
                         stream_of(on), matrices);
      });
    });
    matrices.tensors.clear();
    matrices.wide = true;
  };
  for (const QuantizeArgs& args : all) {
    const int64_t rows = args.x.rows(), cols = args.x.cols();
    const bool few_rows = rows < kFewRows && !args.out.columnwise;
    if (rows == 0 || cols == 0 || few_rows) {
      cuda::quantize(args, on);
      continue;
    }
    const TileWalk walk = walk_of(rows, cols);
    require(tiles_can_walk(walk, cols), Kind::Unsupported, kOp,
            "expected fewer than 2^26 rows, got ", rows);
    const Matrix matrix{args.x.data, rows, tile_map_cols(cols, kOp), sink_of(args.out)};
    matrices.wide = matrices.wide && cols % 8 == 0 && is_aligned(matrix.x, 16) &&
                    is_aligned(matrix.out.rowwise, 8);
    matrices.tensors.add(matrix, walk.grid_x() * walk.grid_y());
    if (matrices.tensors.is_full()) launch();
  }
  launch();
}

void quantize(const QuantizeArgs& args, Stream on) {
  const DeviceGuard guard(args.x.device);
  const cudaStream_t stream = stream_of(on);
  bool taken = false;
  if (args.dbias) {
    taken = by_tiles<true>(args, stream);
    finish_column_sums(args.workspace, ceil_div(args.x.rows(), kTile), args.x.cols(), args.dbias,
                       {}, stream);
  } else if (args.out.columnwise) {
    taken = by_tiles<false>(args, stream);
  } else {
    dispatch_high_precision(args.x.dtype, "quantize", [&](auto in) {
      dispatch_fp8(args.out.dtype, "quantize", [&](auto out) {
        cast<typename decltype(in)::type, typename decltype(out)::type>(args, stream);
      });
    });
  }
  if (args.moments && !taken) cuda::moments({args.x, args.moments}, on);
}

}  // namespace te::cuda
