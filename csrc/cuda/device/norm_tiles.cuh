// The work of a warp in norm_tiles.cu: 8 rows of a cluster's tile, 256 columns of each step.
//   1. Each warp copies 8 rows of its columns into shared memory and finds their mean and squares.
//   2. It sends them to all blocks of the cluster; behind the cluster's barrier each warp merges
//      the parts of its rows.
//   3. It reads its values again, writes row-wise codes from registers, and leaves the codes in a
//      tile over the values it has read; the block writes the tile's columns.
// A lane has 8 x 8 values of a step, the block that CodeTile takes.
#pragma once

#include "cuda/device/cluster.cuh"
#include "cuda/device/float8.cuh"
#include "cuda/device/norm_row.cuh"
#include "cuda/device/pack_io.cuh"
#include "cuda/device/quantized_sink.cuh"
#include "cuda/device/tile_moments.cuh"
#include "cuda/device/tile_transpose.cuh"
#include "cuda/policy/norm.h"
#include "ops/norm.h"

namespace te::cuda::norm_tiles {

constexpr int kWarps = 8;
constexpr int kThreads = 32 * kWarps;
constexpr int kUnitRows = 8;  // a warp's part of a step is 8 rows of 256 columns
constexpr int kUnitCols = 256;
static_assert(kWarps * kUnitRows * kUnitCols == kStepElements);

struct Problem {
  const void* x = nullptr;
  const void* gamma = nullptr;
  const void* beta = nullptr;
  DType gamma_dtype = DType::Float32;
  float gamma_offset = 0.0f;  // 1 with a zero-centred gamma
  float epsilon = 0.0f;
  int64_t rows = 0;
  int cols = 0;
  int steps = 0;
  int cluster = 0;
  void* y = nullptr;  // in the dtype of x
  bool e5m2 = false;
  QuantizedSink fp8;
  float* mean = nullptr;
  float* rstd = nullptr;
  TileMomentsSink moments = {};
};

// Keeps what is computed from it inside the loop: addresses of one step that are the same in all of
// them would fill the registers.
__device__ __forceinline__ int opaque(int value) {
  asm volatile("" : "+r"(value));
  return value;
}

// Sums of eight rows over a warp; lane l gets that of row l / 4. Each exchange halves the rows that
// a lane keeps: 9 shuffles instead of 40.
__device__ __forceinline__ float sum_rows(float (&value)[8]) {
  const unsigned lane = threadIdx.x % 32;
#pragma unroll
  for (int half = 4; half > 0; half /= 2) {
    const bool upper = (lane & (4 * half)) != 0;
#pragma unroll
    for (int i = 0; i < half; ++i) {
      const float mine = upper ? value[i + half] : value[i];
      const float theirs = upper ? value[i] : value[i + half];
      value[i] = mine + __shfl_xor_sync(0xffffffffu, theirs, 4 * half);
    }
  }
  float sum = value[0];
  sum += __shfl_xor_sync(0xffffffffu, sum, 2);
  return sum + __shfl_xor_sync(0xffffffffu, sum, 1);
}

// Sum over the four lanes that look after one row.
__device__ __forceinline__ float sum_of_four(float value) {
  value += __shfl_xor_sync(0xffffffffu, value, 2);
  return value + __shfl_xor_sync(0xffffffffu, value, 1);
}

// What one warp does with its 8 rows and its columns of each step.
template <class In, NormKind kKind, int kRows>
class Worker {
  static constexpr int kRowGroups = kRows / kUnitRows;
  static constexpr int kColumnWarps = kWarps / kRowGroups;
  static constexpr bool kCentered = kKind == NormKind::LayerNorm;
  using Tile = CodeTile<kRows, kUnitCols>;
  static_assert(kColumnWarps * Tile::kBytes <= kStepElements * static_cast<int>(sizeof(In)));

 public:
  // `values`: shared, steps * kStepElements of In; `parts`: shared, one of each row and column warp
  // of the cluster; `row_statistics`: shared, one of each row of this warp.
  __device__ __forceinline__ Worker(const Problem& problem, void* values, float4* parts,
                                    float2* row_statistics)
      : p(problem),
        values_(static_cast<In*>(values)),
        parts_(parts),
        row_statistics_(row_statistics),
        lane_(static_cast<int>(threadIdx.x) % 32),
        warp_(static_cast<int>(threadIdx.x) / 32),
        rank_(static_cast<int>(blockIdx.x % static_cast<unsigned>(problem.cluster))),
        tile_row_(int64_t{blockIdx.x / static_cast<unsigned>(problem.cluster)} * kRows),
        row_(tile_row_ + warp_ % kRowGroups * kUnitRows),
        rows_(static_cast<int>(max(min(problem.rows - row_, int64_t{kUnitRows}), int64_t{0}))) {}

  __device__ __forceinline__ void start_loads(uint64_t* barrier) const {
    if (lane_ == 0) {
      init_barrier(barrier);
      expect_bytes(barrier, static_cast<uint32_t>(rows_ * my_columns() * sizeof(In)));
    }
    __syncwarp();
    start_copies(p.steps * kUnitRows, barrier, [&](int i) -> CopyPiece {
      const int step = i / kUnitRows, row = i % kUnitRows;
      return {unit(step) + row * kUnitCols,
              static_cast<const In*>(p.x) + (row_ + row) * p.cols + first_column(step),
              static_cast<uint32_t>(row < rows_ ? columns(step) * sizeof(In) : 0)};
    });
  }

  // Mean and sum of squares around it, of the columns of this warp, to every block of the cluster.
  __device__ __forceinline__ void send_parts() const {
    const auto count = static_cast<float>(my_columns());
    float sums[kUnitRows] = {};
    float mean = 0.0f, means[kUnitRows] = {};
    if constexpr (kCentered) {
      add_terms(sums, [](float value, int) { return value; });
      mean = sum_rows(sums) / fmaxf(count, 1.0f);
#pragma unroll
      for (int r = 0; r < kUnitRows; ++r) {
        means[r] = __shfl_sync(0xffffffffu, mean, 4 * r);
        sums[r] = 0.0f;
      }
    }
    add_terms(sums, [&](float value, int r) {
      const float distance = kCentered ? value - means[r] : value;
      return distance * distance;
    });
    const float squares = sum_rows(sums);
    const int slot = rank_ * kColumnWarps + warp_ / kRowGroups;
#pragma unroll 1
    for (int rank = lane_ % 4; rank < p.cluster; rank += 4)
      store_remote(remote_address(parts_of_row() + slot, static_cast<uint32_t>(rank)),
                   float4{mean, squares, count, 0.0f});
  }

  __device__ __forceinline__ void merge_parts() const {
    const int slots = p.cluster * kColumnWarps;
    const float inverse_cols = 1.0f / static_cast<float>(p.cols);
    float mean = 0.0f, squares = 0.0f;
    if constexpr (kCentered) {
#pragma unroll 1
      for (int slot = lane_ % 4; slot < slots; slot += 4)
        mean += parts_of_row()[slot].x * parts_of_row()[slot].z;
      mean = sum_of_four(mean) * inverse_cols;
    }
#pragma unroll 1
    for (int slot = lane_ % 4; slot < slots; slot += 4) {
      const float4 part = parts_of_row()[slot];
      squares += part.y + part.z * (part.x - mean) * (part.x - mean);
    }
    const float rstd = rsqrtf(sum_of_four(squares) * inverse_cols + p.epsilon);
    if (lane_ % 4 == 0) {
      row_statistics_[lane_ / 4] = {mean, rstd};
      if (rank_ == 0 && warp_ < kRowGroups && lane_ / 4 < rows_) {
        if constexpr (kCentered) p.mean[row_ + lane_ / 4] = mean;
        p.rstd[row_ + lane_ / 4] = rstd;
      }
    }
    __syncwarp();
  }

  // Returns the amax of this lane's results.
  template <class Gathered>
  __device__ __forceinline__ float write_results(float scale, Gathered& moments) const {
    float amax = 0.0f;
#pragma unroll 1
    for (int step = 0; step < p.steps; ++step) {
      CodeBlock codes;
      const bool has_columns = lane_ * 8 < columns(step);
      if (has_columns) {
        if (p.y) write_plain(step);
        amax = fmaxf(amax, p.e5m2 ? write_codes<E5M2>(step, scale, codes, moments)
                                  : write_codes<E4M3>(step, scale, codes, moments));
      }
      if (p.fp8.columnwise) write_columns(step, has_columns, codes);
    }
    return amax;
  }

  // Of the warp, whose columns are whole units.
  __device__ __forceinline__ MomentSums moments(const PackedMoments<In, float>& gathered) const {
    MomentSums sums = gathered.warp_sums();
    if (!gathered.is_exact(sums)) sums = exact_moments();
    return sums;
  }

 private:
  __device__ __forceinline__ int first_column(int step) const {
    return ((rank_ * p.steps + step) * kColumnWarps + warp_ / kRowGroups) * kUnitCols;
  }
  // Columns of this warp in a step that exist.
  __device__ __forceinline__ int columns(int step) const {
    return max(min(p.cols - first_column(step), kUnitCols), 0);
  }
  __device__ __forceinline__ int my_columns() const {
    int count = 0;
#pragma unroll 1
    for (int step = 0; step < p.steps; ++step) count += columns(step);
    return count;
  }
  __device__ __forceinline__ In* unit(int step) const {
    return values_ + (step * kWarps + warp_) * (kUnitRows * kUnitCols);
  }
  // The parts of row lane / 4.
  __device__ __forceinline__ float4* parts_of_row() const {
    const int row = warp_ % kRowGroups * kUnitRows + lane_ / 4;
    return parts_ + row * p.cluster * kColumnWarps;
  }

  template <class Term>
  __device__ __forceinline__ void add_terms(float (&sums)[kUnitRows], Term&& term) const {
#pragma unroll 1
    for (int step = 0; step < p.steps; ++step) {
      if (lane_ * 8 >= columns(step)) continue;
#pragma unroll
      for (int r = 0; r < kUnitRows; ++r) {
        float values[8];
        load_values<In>(unit(step) + r * kUnitCols + lane_ * 8, values);
        sums[r] += sum_of(values, [&](float value) { return term(value, r); });
      }
    }
  }

  __device__ __forceinline__ void load_affine(int col, float (&gamma)[8], float (&beta)[8]) const {
    with_dtype(p.gamma_dtype, [&](auto tag) {
      using T = typename decltype(tag)::type;
      load_values<T>(static_cast<const T*>(p.gamma) + col, gamma);
      if constexpr (kCentered) load_values<T>(static_cast<const T*>(p.beta) + col, beta);
    });
#pragma unroll
    for (int k = 0; k < 8; ++k) gamma[k] += p.gamma_offset;
  }

  // Row r of a step in fp32; the lane's 8 columns.
  __device__ __forceinline__ void normalise(int step, int r, const float (&gamma)[8],
                                            const float (&beta)[8], float (&y)[8]) const {
    load_values<In>(unit(step) + r * kUnitCols + lane_ * 8, y);
    normalise_values(r, gamma, beta, y);
  }
  __device__ __forceinline__ void normalise_values(int r, const float (&gamma)[8],
                                                   const float (&beta)[8], float (&y)[8]) const {
    const float2 statistics = row_statistics_[r];
    const Standardised standardised(statistics.x, statistics.y);
#pragma unroll
    for (int k = 0; k < 8; ++k) {
      if constexpr (!kCentered)
        y[k] *= statistics.y;
      else if constexpr (sizeof(In) == 2)
        y[k] = standardised(y[k]);
      else
        y[k] = (y[k] - statistics.x) * statistics.y;
      y[k] *= gamma[k];
      if constexpr (kCentered) y[k] += beta[k];
    }
  }

  template <class Fp8, class Gathered>
  __device__ __forceinline__ float write_codes(int step, float scale, CodeBlock& codes,
                                               Gathered& moments) const {
    const int col = first_column(step) + lane_ * 8;
    uint8_t* to = p.fp8.rowwise + row_ * p.cols + col;
    float gamma[8], beta[8], amax = 0.0f;
    load_affine(col, gamma, beta);
#pragma unroll
    for (int r = 0; r < kUnitRows; ++r, to += p.cols) {
      codes.rows[r] = {0, 0};
      if (r < rows_) {
        float y[8];
        normalise(step, r, gamma, beta, y);
#pragma unroll
        for (int k = 0; k < 8; ++k) amax = fmaxf(amax, fabsf(y[k]));
        codes.rows[r] = encode8<Fp8>(y, scale);
        if (p.fp8.rowwise) *reinterpret_cast<uint2*>(to) = codes.rows[r];
        if constexpr (kTakesMoments<Gathered>) moments.add(rounded_octet<In>(y));
      }
      if constexpr (kTakesMoments<Gathered>) {
        if ((r + 1) % Gathered::kLongest == 0) moments.fold();
      }
    }
    return amax;
  }

  // In fp64. Codes lie over the values in shared memory by now.
  __device__ __forceinline__ MomentSums exact_moments() const {
    MomentSums sums = MomentSums::empty();
#pragma unroll 1
    for (int step = 0; step < p.steps; ++step) {
      const int col = first_column(step) + lane_ * 8;
      if (col >= p.cols) break;
      float gamma[8], beta[8], y[8];
      load_affine(col, gamma, beta);
#pragma unroll 1
      for (int r = 0; r < rows_; ++r) {
        load_values<In>(static_cast<const In*>(p.x) + (row_ + r) * p.cols + col, y);
        normalise_values(r, gamma, beta, y);
#pragma unroll
        for (int k = 0; k < 8; ++k) sums.add(static_cast<double>(static_cast<float>(In(y[k]))), 0);
      }
    }
    return warp_add(sums);
  }

  // Computed again: rarely asked for together with codes.
  __device__ __forceinline__ void write_plain(int step) const {
    const int col = first_column(step) + lane_ * 8;
    float gamma[8], beta[8], y[8];
    load_affine(col, gamma, beta);
#pragma unroll 1
    for (int r = 0; r < rows_; ++r) {
      normalise(step, r, gamma, beta, y);
      store_values<In>(static_cast<In*>(p.y) + (row_ + r) * p.cols + col, y);
    }
  }

  // All threads of the block. The tile lies over this step's values, which nobody reads any more.
  __device__ __forceinline__ void write_columns(int step, bool has_columns,
                                                const CodeBlock& codes) const {
    const int thread = opaque(static_cast<int>(threadIdx.x));
    const int column_warp = thread / (32 * kRowGroups);
    uint8_t* memory = reinterpret_cast<uint8_t*>(values_ + int64_t{step} * kStepElements);
    const Tile tile(memory + column_warp * Tile::kBytes);
    __syncthreads();
    if (has_columns) tile.put(thread / 32 % kRowGroups * kUnitRows, thread % 32 * 8, codes);
    __syncthreads();
    const TileTarget target{
        p.fp8.columnwise + int64_t{first_column(step)} * p.rows + tile_row_, p.rows,
        static_cast<int>(min(p.rows - tile_row_, int64_t{kRows})), columns(step),
        p.rows % 16 == 0 && reinterpret_cast<uintptr_t>(p.fp8.columnwise) % 16 == 0};
    constexpr int kStoring = kThreads / kColumnWarps;
    tile.template store<kStoring>(target, static_cast<unsigned>(thread) % kStoring);
  }

  const Problem& p;
  In* values_;
  float4* parts_;
  float2* row_statistics_;
  int lane_, warp_, rank_;
  int64_t tile_row_, row_;  // first row of the cluster's tile, and of this warp
  int rows_;                // of this warp that exist
};

}  // namespace te::cuda::norm_tiles
