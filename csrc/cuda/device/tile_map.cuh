// An elementwise function of one to three matrices, written in every form that a GEMM or a module
// asks for, in one pass: plain, FP8 row-wise, FP8 transposed, column sums, amax or current scale,
// moments.
//
// A block of 256 threads takes a tile of 128 x 128. A thread reads eight neighbours of eight rows
// of every input, keeps the codes of its 8 x 8 values in registers, stores them row by row, and
// hands them to CodeTile for the transposed store.
//
//   struct Function {
//     static constexpr int kInputs, kOutputs;
//     static constexpr int kPitch(int k);  // input k has rows of kPitch(k) * cols elements
//     static constexpr bool kPlain, kColumnSums;  // whether these results can be asked for
//     static constexpr bool kCopies;  // the output is the input
//     static constexpr bool kAgain;   // a further value is written, as codes by columns or plain
//     __device__ void operator()(const float (&in)[kInputs], float (&out)[kOutputs]) const;
//     __device__ float again(const float (&in)[kInputs]) const;  // if kAgain
//   };
//
// A function that depends on the position of its elements has `at(row, col)` instead of the
// operator: it returns a function `(in, out, j)` for element j of the eight that start there.
// Moments of its results are not taken.
//
// The outputs lie side by side: they are the halves of one matrix [rows, kOutputs * cols].
// If a function has a member `column_pitch`, this is the distance between rows of transposed codes;
// otherwise they are contiguous.
#pragma once

#include "cuda/device/float8.cuh"
#include "cuda/device/matrix_tile.cuh"
#include "cuda/device/pack_io.cuh"
#include "cuda/device/quantized_sink.cuh"
#include "cuda/device/reduce.cuh"
#include "cuda/device/tile_column_sums.cuh"
#include "cuda/device/tile_moments.cuh"
#include "cuda/device/tile_transpose.cuh"
#include "cuda/device/vector.cuh"
#include "cuda/policy/tile_map.h"

namespace te::cuda {

// Where the further value of functions with `kAgain` is written: [rows, cols]. It has no other
// results.
struct AgainSink {
  void* plain = nullptr;          // dtype of the inputs; may overwrite the first input
  uint8_t* columnwise = nullptr;  // codes, if `plain` is null
  const float* scales = nullptr;  // {1 / scale, scale}
  bool e5m2 = false;
  bool rounded = false;  // to the dtype of the inputs, before it is multiplied by the scale
};

template <class Function>
struct TileMap {
  Function function;
  const void* inputs[Function::kInputs];
  int64_t rows;
  int cols;                // of each output: tile_map_cols()
  bool backwards = false;  // set where the previous pass went forwards
  TileWalk walk = {};      // filled in by the launch
  void* plain = nullptr;   // dtype of the inputs
  QuantizedSink quantized;
  bool e5m2;  // else E4M3
  CurrentScaleSink current = {};
  float* column_parts = nullptr;  // [tile rows, kOutputs * cols]
  AgainSink again = {};
  TileMomentsSink moments = {};  // filled in by the launch
};

template <class In, class Function>
constexpr TileMapPolicy policy_of(bool wide, bool moments) {
  return tile_map_policy<Function>(wide, moments, std::is_same_v<In, Half>);
}
template <class In, class Function>
constexpr int blocks_of(bool wide, bool moments) {
  const TileMapPolicy policy = policy_of<In, Function>(wide, moments);
  return blocks_sharing(policy.blocks_per_multiprocessor, policy.blocks_elsewhere(), kTileThreads);
}

// What a thread gathers over its 8 x 8 values of each output.
template <int kOutputs>
struct MapResults {
  CodeBlock codes[kOutputs];
  float sums[kOutputs][8] = {};
  float amax = 0.0f;
  CodeBlock again;  // unused without `kAgain`
};

template <class Function>
concept DependsOnPlace = requires(const Function& f) {
  f.at(int64_t{}, int{});
};

template <class Function>
__device__ __forceinline__ int64_t column_pitch_of(const TileMap<Function>& map) {
  if constexpr (requires { map.function.column_pitch; })
    return map.function.column_pitch;
  else
    return map.rows;
}

template <class Function>
__device__ __forceinline__ decltype(auto) function_at(const TileMap<Function>& map, TilePlace at,
                                                      const TileBlock& block, int i) {
  if constexpr (DependsOnPlace<Function>)
    return map.function.at(int64_t{at.row} * kTile + min(block.row + i, block.rows - 1),
                           at.col * kTile + block.col);
  else
    return (map.function);
}

template <bool kWide, class In>
__device__ __forceinline__ Octet<In> read_octet(const In* matrix, const TileBlock& block, int i) {
  if constexpr (kWide) return load_octet(block.row_or_last(matrix, i, 8));
  return gather_octet(block.row_or_last(matrix, i, 1), max(0, block.width() - 1));
}

template <bool kWide, class Out>
__device__ __forceinline__ void write_octet(Out* to, const float (&values)[8], int count) {
  if constexpr (kWide) {
    store_octet(to, values);
  } else {
#pragma unroll
    for (int j = 0; j < 8; ++j)
      if (j < count) to[j] = Out(values[j]);
  }
}

template <bool kWide>
__device__ __forceinline__ void write_codes(uint8_t* to, uint2 codes, int count) {
  if constexpr (kWide) {
    *reinterpret_cast<uint2*>(to) = codes;
  } else {
#pragma unroll
    for (int j = 0; j < 8; ++j)
      if (j < count) to[j] = static_cast<uint8_t>((j < 4 ? codes.x : codes.y) >> (8 * (j % 4)));
  }
}

// Row `i` of a thread's block: from the inputs to the plain result, the codes and the sums.
template <bool kWide, class In, class Function, class Gathered>
__device__ __forceinline__ void map_row(const TileMap<Function>& map, TilePlace at,
                                        const TileBlock& block, int i, float scale,
                                        const Octet<In> (&octets)[Function::kInputs],
                                        MapResults<Function::kOutputs>& results,
                                        Gathered& moments) {
  constexpr int kInputs = Function::kInputs, kOutputs = Function::kOutputs;
  float values[kOutputs][8];
  const auto& function = function_at(map, at, block, i);
#pragma unroll
  for (int j = 0; j < 8; ++j) {
    float in[kInputs], out[kOutputs];
#pragma unroll
    for (int k = 0; k < kInputs; ++k) in[k] = octets[k][j];
    if constexpr (DependsOnPlace<Function>)
      function(in, out, j);
    else
      function(in, out);
#pragma unroll
    for (int k = 0; k < kOutputs; ++k) {
      values[k][j] = out[k];
      // If the first input may be overwritten, reads beyond the end may find results of other
      // threads: these do not count for the amax.
      if (!Function::kAgain || (block.has_row(i) && block.width() > 0))
        results.amax = fmaxf(results.amax, fabsf(out[k]));
      if constexpr (Function::kColumnSums) {
        if (block.has_row(i)) results.sums[k][j] += out[k];
      }
    }
  }
#pragma unroll
  for (int k = 0; k < kOutputs; ++k) {
    if constexpr (Function::kPlain) {
      auto* plain = static_cast<In*>(map.plain);
      if (plain && block.has_row(i) && block.width() > 0)
        write_octet<kWide>(block.row_of(plain + k * map.cols, i), values[k], block.width());
    }
    if (map.quantized) results.codes[k].rows[i] = encode8(values[k], scale, map.e5m2);
    if constexpr (kTakesMoments<Gathered>) {
      if constexpr (Function::kCopies)
        moments.add(octets[k]);
      else
        moments.add(rounded_octet<In>(values[k]));
      if ((i * kOutputs + k + 1) % Gathered::kLongest == 0) moments.fold();
    }
  }
}

// The same for the further value. It may overwrite the first input, which has been read by now.
template <bool kWide, class In, class Function>
__device__ __forceinline__ void again_row(const TileMap<Function>& map, TilePlace at, int i,
                                          float scale, const Octet<In> (&octets)[Function::kInputs],
                                          CodeBlock& codes) {
  constexpr int kInputs = Function::kInputs;
  const TileBlock block(at, map.rows, map.cols, map.cols);
  float values[8];
#pragma unroll
  for (int j = 0; j < 8; ++j) {
    float in[kInputs];
#pragma unroll
    for (int k = 0; k < kInputs; ++k) in[k] = octets[k][j];
    values[j] = map.function.again(in);
    if (map.again.rounded) values[j] = static_cast<float>(In(values[j]));
  }
  auto* plain = static_cast<In*>(map.again.plain);
  if (!plain)
    codes.rows[i] = encode8(values, scale, map.again.e5m2);
  else if (block.has_row(i) && block.width() > 0)
    write_octet<kWide>(block.row_of(plain, i), values, block.width());
}

// All loads of some rows are issued before the first value is used.
template <bool kWide, class In, class Function, class Gathered>
__device__ __forceinline__ void map_block(const TileMap<Function>& map, TilePlace at,
                                          const TileBlock& block,
                                          MapResults<Function::kOutputs>& results,
                                          Gathered& moments) {
  constexpr int kInputs = Function::kInputs;
  constexpr auto kPolicy = policy_of<In, Function>(kWide, kTakesMoments<Gathered>);
  constexpr int kLoads = kPolicy.loads_in_flight;
  constexpr int kRows = kLoads / (kInputs * Octet<In>::kWords);
  static_assert(kRows > 0 && 8 % kRows == 0);
  float scale = 1.0f;
  [[maybe_unused]] float again_scale = 1.0f;
  if constexpr (Function::kAgain) {
    if (!map.again.plain) again_scale = map.again.scales[1];
  }
#pragma unroll
  for (int first = 0; first < 8; first += kRows) {
    Octet<In> octets[kRows][kInputs];
#pragma unroll
    for (int i = 0; i < kRows; ++i)
#pragma unroll
      for (int k = 0; k < kInputs; ++k) {
        const TileBlock source(at, map.rows, map.cols, Function::kPitch(k) * map.cols);
        octets[i][k] = read_octet<kWide>(static_cast<const In*>(map.inputs[k]), source, first + i);
      }
    if (first == 0 && map.quantized)
      scale = map.quantized.scale_used(at.row == 0 && at.col == 0 && threadIdx.x == 0);
#pragma unroll
    for (int i = 0; i < kRows; ++i) {
      map_row<kWide>(map, at, block, first + i, scale, octets[i], results, moments);
      if constexpr (Function::kAgain)
        again_row<kWide>(map, at, first + i, again_scale, octets[i], results.again);
    }
  }
}

// Takes the moments of a warp's part of a tile again, in fp64, over the elements that exist.
template <class In, class Function>
__device__ __forceinline__ MomentSums exact_moments(const TileMap<Function>& map, TilePlace at,
                                                    const TileBlock& block) {
  constexpr int kInputs = Function::kInputs, kOutputs = Function::kOutputs;
  MomentSums sums = MomentSums::empty();
#pragma unroll 1
  for (int element = 0; element < 64; ++element) {
    const int i = element / 8, j = element % 8;
    if (!block.has_row(i) || j >= block.width()) continue;
    float in[kInputs], out[kOutputs];
#pragma unroll
    for (int k = 0; k < kInputs; ++k) {
      const TileBlock source(at, map.rows, map.cols, Function::kPitch(k) * map.cols);
      in[k] = static_cast<float>(source.row_of(static_cast<const In*>(map.inputs[k]), i)[j]);
    }
    map.function(in, out);
#pragma unroll
    for (int k = 0; k < kOutputs; ++k)
      sums.add(static_cast<double>(static_cast<float>(In(out[k]))), 0);
  }
  return warp_add(sums);
}

// The moments of a warp's part of a tile. Packed sums always count 8 x 8 elements of each thread,
// so they are used where the tile is complete.
template <class In, class Function>
__device__ __forceinline__ MomentSums moments_of_warp(const TileMap<Function>& map, TilePlace at,
                                                      const TileBlock& block,
                                                      const PackedMoments<In, float>& gathered) {
  if (block.rows == kTile && block.cols == kTile) {
    const MomentSums sums = gathered.warp_sums();
    if (gathered.is_exact(sums)) return sums;
  }
  return exact_moments<In>(map, at, block);
}

template <bool kWide, int kOutputs>
__device__ __forceinline__ void store_rows(uint8_t* out, int cols, const TileBlock& block,
                                           const CodeBlock (&codes)[kOutputs]) {
  if (!out || block.width() <= 0) return;
#pragma unroll
  for (int k = 0; k < kOutputs; ++k)
#pragma unroll
    for (int i = 0; i < 8; ++i)
      if (block.has_row(i))
        write_codes<kWide>(block.row_of(out + k * cols, i), codes[k].rows[i], block.width());
}

// Whether the codes of the further value have a tile of their own in shared memory. With two
// outputs, whose tiles take all static shared memory, they use the first tile after its codes are
// stored.
template <class Function>
constexpr bool kAgainApart = Function::kAgain&& Function::kOutputs == 1;

template <class Codes, class Function>
__device__ __forceinline__ void store_again(const TileMap<Function>& map, TilePlace at,
                                            void* memory, const CodeBlock& codes) {
  const TileBlock block(at, map.rows, map.cols, map.cols);
  if constexpr (!kAgainApart<Function>) {
    __syncthreads();
    Codes(memory).put(block.row, block.col, codes);
    __syncthreads();
  }
  Codes(memory).template store<kTileThreads>(target_of(map.again.columnwise, map.rows, at, block));
}

// The work of a block.
template <class In, class Function, bool kWide, bool kMoments>
__device__ __forceinline__ void map_tile(const TileMap<Function>& map, TilePlace at) {
  static_assert(!(Function::kCopies && Function::kAgain), "a copy is there already");
  constexpr int kOutputs = Function::kOutputs;
  constexpr int kWarps = kTileThreads / 32;
  using Codes = CodeTile<kTile, kTile>;
  constexpr int kAgainTile = kAgainApart<Function> ? kOutputs : 0;
  __shared__ alignas(16) uint8_t memory[kOutputs + kAgainApart<Function>][Codes::kBytes];
  [[maybe_unused]] __shared__ alignas(16) TileColumnSums<kOutputs> sums;
  [[maybe_unused]] __shared__ TileMoments<kWarps> moments;
  __shared__ BlockAmax<kWarps> block_amax;
  const TileBlock block(at, map.rows, map.cols, kOutputs * map.cols);

  MapResults<kOutputs> results;
  GatheredMoments<In, kMoments> gathered;
  map_block<kWide, In>(map, at, block, results, gathered);
  store_rows<kWide>(map.quantized.rowwise, map.cols, block, results.codes);
#pragma unroll
  for (int k = 0; k < kOutputs; ++k) {
    if (map.quantized.columnwise) Codes(memory[k]).put(block.row, block.col, results.codes[k]);
    if constexpr (Function::kColumnSums) sums.leave(k, block.col, results.sums[k]);
  }
  if constexpr (kAgainApart<Function>) {
    if (map.again.columnwise) Codes(memory[kAgainTile]).put(block.row, block.col, results.again);
  }
  block_amax.leave(results.amax);
  if constexpr (kMoments) {
    if (map.moments) moments.leave(moments_of_warp(map, at, block, gathered));
  }
  __syncthreads();

#pragma unroll
  for (int k = 0; k < kOutputs; ++k) {
    uint8_t* const out = map.quantized.columnwise + k * map.cols * column_pitch_of(map);
    if (map.quantized.columnwise)
      Codes(memory[k]).template store<kTileThreads>(
          target_of(out, column_pitch_of(map), at, block));
  }
  if constexpr (Function::kAgain) {
    if (map.again.columnwise) store_again<Codes>(map, at, memory[kAgainTile], results.again);
  }
  if constexpr (Function::kColumnSums) {
    if (map.column_parts)
      sums.store(map.column_parts + int64_t{at.row} * block.pitch + at.col * kTile, map.cols,
                 block.cols);
  }
  if constexpr (kMoments) {
    if (threadIdx.x / 32 == kWarps - 1 && map.moments)
      moments.finish(map.moments, at.row * map.walk.cols + at.col);
  }
  if (threadIdx.x != 0) return;
  const float amax = block_amax.total();
  if (map.quantized.amax) atomic_max(map.quantized.amax, amax);
  // Rounding keeps order: this is the amax of the values as rounded.
  if (map.current) map.current.finish(static_cast<float>(In(amax)), map.walk.rows * map.walk.cols);
}

}  // namespace te::cuda
