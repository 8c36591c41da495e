// Casts to FP8 with block scales. A block of 256 threads takes a tile of 128 x 128, which holds
// whole scaling blocks of every kind. A thread keeps 8 x 8 values in registers, as they were
// loaded, until it knows their scales:
//   128 x 128: one amax of the tile, combined at a barrier. The codes of both results are the same.
//   1 x 128 along rows: 16 lanes share eight rows and find their scales by shuffles. The row-wise
//     codes are stored at once.
//   1 x 128 along columns: warps store the amaxes of their rows in shared memory, one thread per
//     column computes the scale, and the values are encoded a second time.
// CodeTile stores the transposed codes.
#include "ops/quantize_blocks.h"

#include "cuda/column_sum.h"
#include "cuda/device/magnitudes.cuh"
#include "cuda/device/tile_map_launch.cuh"
#include "cuda/policy/quantize_blocks.h"

namespace te::cuda {
namespace {

constexpr const char* kOp = "quantize_blocks";
constexpr int kWarps = kTileThreads / 32;
static_assert(kTile == kScaleBlock);

// One result: its codes and inverse scales. `grid` is the shape of the scales.
struct BlockSink {
  uint8_t* codes;
  float* inverses;
  ScaleGrid grid;

  __device__ __forceinline__ explicit operator bool() const { return codes; }
  // Stores the inverse scale of a line in a tile. A line is a row of the result; there are `lines`,
  // and the entries that pad them to the size of the grid become zero.
  __device__ __forceinline__ void put_line(int64_t line, int64_t lines, int tile,
                                           float inverse) const {
    if (line < grid.cols) inverses[tile * grid.cols + line] = line < lines ? inverse : 0.0f;
  }
};

struct BlockTiles {
  const void* x;
  int64_t rows;
  int cols;
  TileWalk walk;
  BlockSink rowwise, columnwise;
  float fp8_max, epsilon;
  bool e5m2, power_of_2;
  float* column_parts;  // [tile rows, cols]

  template <class In>
  __device__ __forceinline__ float scale(float amax) const {
    return block_scale<In>(amax, fp8_max, epsilon, power_of_2);
  }
};

template <class In>
__device__ __forceinline__ void unpack(const Octet<In>& octet, float (&values)[8]) {
#pragma unroll
  for (int j = 0; j < 8; ++j) values[j] = octet[j];
}

__device__ __forceinline__ uint2 encode_octet(const float (&values)[8], bool e5m2) {
  return encode8(values, 1.0f, e5m2);
}

// Takes the maxima of eight values over 16 lanes: lane l of the 16 gets that of value l / 2.
__device__ __forceinline__ float max_of_line(float (&values)[8]) {
  const int lane = static_cast<int>(threadIdx.x) % 16;
#pragma unroll
  for (int half = 4; half > 0; half /= 2) {
    const bool upper = lane & (2 * half);
#pragma unroll
    for (int k = 0; k < half; ++k) {
      const float mine = upper ? values[k + half] : values[k];
      const float theirs = upper ? values[k] : values[k + half];
      values[k] = fmaxf(mine, __shfl_xor_sync(0xffffffffu, theirs, 2 * half));
    }
  }
  return fmaxf(values[0], __shfl_xor_sync(0xffffffffu, values[0], 1));
}

// A thread's 8 x 8 values of the tile, in registers.
template <class In>
struct BlockValues {
  Octet<In> rows[8];

  template <bool kWide>
  __device__ __forceinline__ void load(const BlockTiles& args, const TileBlock& block) {
#pragma unroll
    for (int i = 0; i < 8; ++i)
      rows[i] = read_octet<kWide>(static_cast<const In*>(args.x), block, i);
  }

  __device__ __forceinline__ OctetMagnitudes<In> of_columns() const {
    OctetMagnitudes<In> largest = magnitudes_of(rows[0]);
#pragma unroll
    for (int i = 1; i < 8; ++i) largest.raise(magnitudes_of(rows[i]));
    return largest;
  }

  __device__ __forceinline__ void sum(const TileBlock& block, float (&sums)[8]) const {
#pragma unroll
    for (int i = 0; i < 8; ++i)
#pragma unroll
      for (int j = 0; j < 8; ++j)
        if (block.has_row(i)) sums[j] += rows[i][j];
  }
};

// 1 x 128 blocks along rows: stores their scales and codes.
template <class In, bool kWide>
__device__ __forceinline__ void quantize_rows(const BlockTiles& args, TilePlace at,
                                              const TileBlock& block,
                                              const BlockValues<In>& values) {
  float amaxes[8];
#pragma unroll
  for (int i = 0; i < 8; ++i) amaxes[i] = magnitudes_of(values.rows[i]).largest();
  const float scale = args.scale<In>(max_of_line(amaxes));
  const int lane = static_cast<int>(threadIdx.x) % 16;
  if (lane % 2 == 0)
    args.rowwise.put_line(int64_t{at.row} * kTile + block.row + lane / 2, args.rows, at.col,
                          divide(1.0f, scale));
#pragma unroll
  for (int i = 0; i < 8; ++i) {
    const float row_scale = __shfl_sync(0xffffffffu, scale, 2 * i, 16);
    float scaled[8];
#pragma unroll
    for (int j = 0; j < 8; ++j) scaled[j] = values.rows[i][j] * row_scale;
    if (block.has_row(i) && block.width() > 0)
      write_codes<kWide>(block.row_of(args.rowwise.codes, i), encode_octet(scaled, args.e5m2),
                         block.width());
  }
}

// Shared memory in which threads combine the amaxes of the tile's columns.
template <class In>
struct ColumnScales {
  alignas(16) uint32_t amaxes[kWarps][kTile * sizeof(In) / 4];
  alignas(16) float scales[kTile];

  // Stores the amaxes of columns over a warp's sixteen rows. A barrier must follow.
  __device__ __forceinline__ void leave(const TileBlock& block, OctetMagnitudes<In> largest) {
    constexpr int kWords = OctetMagnitudes<In>::kWords;
#pragma unroll
    for (int i = 0; i < kWords; ++i)
      largest.word[i] = max_word<In>(largest.word[i],
                                     __shfl_xor_sync(0xffffffffu, largest.word[i], kOctetsPerRow));
    if (threadIdx.x % 32 >= kOctetsPerRow) return;
    uint32_t* to = amaxes[threadIdx.x / 32] + block.col / 8 * kWords;
#pragma unroll
    for (int i = 0; i < kWords; i += 4)
      store_pack(to + i, Pack<uint32_t, 4>{largest.word[i], largest.word[i + 1],
                                           largest.word[i + 2], largest.word[i + 3]});
  }
  // Computes the scales, with one thread per column. To be called between two barriers.
  __device__ __forceinline__ void find(const BlockTiles& args, TilePlace at) {
    const int col = static_cast<int>(threadIdx.x);
    if (col >= kTile) return;
    float amax = 0.0f;
#pragma unroll
    for (int warp = 0; warp < kWarps; ++warp)
      amax = fmaxf(amax, static_cast<float>(reinterpret_cast<const In*>(amaxes[warp])[col]));
    const float scale = args.scale<In>(amax);
    scales[col] = scale;
    args.columnwise.put_line(int64_t{at.col} * kTile + col, args.cols, at.row, divide(1.0f, scale));
  }
};

// 1 x 128 blocks along columns: returns the codes of the thread's values.
template <class In>
__device__ __forceinline__ CodeBlock encode_columns(const BlockTiles& args, const TileBlock& block,
                                                    const BlockValues<In>& values,
                                                    const ColumnScales<In>& columns) {
  CodeBlock codes;
  const auto low = load_pack<float, 4>(columns.scales + block.col);
  const auto high = load_pack<float, 4>(columns.scales + block.col + 4);
#pragma unroll
  for (int i = 0; i < 8; ++i) {
    float scaled[8];
#pragma unroll
    for (int j = 0; j < 8; ++j)
      scaled[j] = values.rows[i][j] * (j < 4 ? low.at[j % 4] : high.at[j % 4]);
    codes.rows[i] = encode_octet(scaled, args.e5m2);
  }
  return codes;
}

template <class In>
__device__ __forceinline__ CodeBlock encode_square(const BlockTiles& args,
                                                   const BlockValues<In>& values, float scale) {
  CodeBlock codes;
#pragma unroll
  for (int i = 0; i < 8; ++i) {
    float scaled[8];
#pragma unroll
    for (int j = 0; j < 8; ++j) scaled[j] = values.rows[i][j] * scale;
    codes.rows[i] = encode_octet(scaled, args.e5m2);
  }
  return codes;
}

// Stores the inverse scale of a tile, in both results. Threads of the last tile of a line also
// clear the padding of that line.
__device__ __forceinline__ void put_square(const BlockTiles& args, TilePlace at, float inverse) {
  const int i = static_cast<int>(threadIdx.x);
  const auto put = [&](const BlockSink& sink, int row, int col, int cols) {
    const bool last = col == cols - 1;
    if (sink && (i == 0 || (last && i < 4 && col + i < sink.grid.cols)))
      sink.inverses[row * sink.grid.cols + col + i] = i == 0 ? inverse : 0.0f;
  };
  put(args.rowwise, at.row, at.col, args.walk.cols);
  put(args.columnwise, at.col, at.row, args.walk.rows);
}

template <class In, bool kSquares, bool kSums, bool kWide>
__global__ void __launch_bounds__(kTileThreads, quantize_blocks_residency(sizeof(In), kSums, kWide))
    quantize_blocks_kernel(const BlockTiles args) {
  follow_previous_kernel();
  using Codes = CodeTile<kTile, kTile>;
  __shared__ alignas(16) uint8_t memory[Codes::kBytes];
  [[maybe_unused]] __shared__ ColumnScales<In> columns;
  [[maybe_unused]] __shared__ BlockAmax<kWarps> square;
  [[maybe_unused]] __shared__ alignas(16) TileColumnSums<1> sums;
  const TilePlace at = args.walk.at(blockIdx.x, blockIdx.y);
  if (!args.walk.has(at)) return;
  const TileBlock block(at, args.rows, args.cols);
  BlockValues<In> values;
  values.template load<kWide>(args, block);
  if constexpr (kSums) {
    float own[8] = {};
    values.sum(block, own);
    sums.leave(0, block.col, own);
  }

  CodeBlock codes;
  if constexpr (kSquares) {
    square.leave(values.of_columns().largest());
    __syncthreads();
    const float scale = args.scale<In>(square.total());
    put_square(args, at, divide(1.0f, scale));
    codes = encode_square(args, values, scale);
    const CodeBlock results[1] = {codes};
    store_rows<kWide>(args.rowwise.codes, args.cols, block, results);
  } else {
    if (args.columnwise) columns.leave(block, values.of_columns());
    if (args.rowwise) quantize_rows<In, kWide>(args, at, block, values);
    __syncthreads();
    if (args.columnwise) {
      columns.find(args, at);
      __syncthreads();
      codes = encode_columns(args, block, values, columns);
    }
  }
  if constexpr (kSums)
    sums.store(args.column_parts + int64_t{at.row} * args.cols + at.col * kTile, args.cols,
               block.cols);
  if (!args.columnwise) return;
  Codes(memory).put(block.row, block.col, codes);
  __syncthreads();
  Codes(memory).template store<kTileThreads>(
      target_of(args.columnwise.codes, args.rows, at, block));
}

BlockSink sink_of(const BlockCodes& side, ScaleBlocks blocks) {
  if (!side) return {};
  return {side.codes.ptr<uint8_t>(), side.scales.ptr<float>(),
          scale_grid(blocks, side.codes.rows(), side.codes.cols())};
}

}  // namespace

void quantize_blocks(const QuantizeBlocksArgs& args, Stream on) {
  const TensorView& x = args.x;
  const DeviceGuard guard(x.device);
  const cudaStream_t stream = stream_of(on);
  const TileWalk walk(ceil_div(x.rows(), kTile), ceil_div(x.cols(), kTile), false);
  require(tiles_can_walk(walk, x.cols()), Kind::Unsupported, kOp,
          "expected fewer than 2^26 rows, got ", x.rows());
  const BlockTiles tiles{.x = x.data,
                         .rows = x.rows(),
                         .cols = tile_map_cols(x.cols(), kOp),
                         .walk = walk,
                         .rowwise = sink_of(args.rowwise, args.blocks),
                         .columnwise = sink_of(args.columnwise, args.blocks),
                         .fp8_max = max_of(args.dtype),
                         .epsilon = args.epsilon,
                         .e5m2 = args.dtype == DType::Float8E5M2,
                         .power_of_2 = args.power_of_2,
                         .column_parts = args.workspace.memory.ptr<float>()};
  const bool wide =
      x.cols() % 8 == 0 && is_aligned(x.data, 16) && is_aligned(args.rowwise.codes.data, 8);
  if (x.numel() > 0) {
    const dim3 grid(static_cast<unsigned>(walk.grid_x()), static_cast<unsigned>(walk.grid_y()));
    dispatch_high_precision(x.dtype, kOp, [&](auto in) {
      dispatch_bool(args.blocks == ScaleBlocks::Squares, [&](auto squares) {
        dispatch_bool(static_cast<bool>(args.dbias), [&](auto sums) {
          dispatch_bool(wide, [&](auto is_wide) {
            using In = typename decltype(in)::type;
            launch_dependent(quantize_blocks_kernel<In, squares(), sums(), is_wide()>, grid,
                             kTileThreads, 0, stream, tiles);
          });
        });
      });
    });
  }
  if (args.dbias)
    finish_column_sums(args.workspace, ceil_div(x.rows(), kTile), x.cols(), args.dbias, {}, stream);
}

}  // namespace te::cuda
