// Delayed scaling for many scaling states in one launch. A column is the amax history of one
// tensor. Each state has kColumnBlocks blocks, which take its columns in turn. A history is shifted
// in place: a block reads a whole chunk of rows before it writes any of them.
#include "ops/delayed_scaling.h"

#include <cmath>

#include "core/scaling.h"
#include "cuda/device/dependent_launch.cuh"
#include "cuda/device/reduce.cuh"

namespace te::cuda {
namespace {

constexpr int kThreads = 256;
constexpr int kWarps = kThreads / 32;
constexpr int kRowsPerThread = 4;  // in flight: 1024 rows go in one chunk
constexpr int kColumnBlocks = 8;   // blocks per state, which take its columns in turn

struct Columns {
  const ScalingEntry* table;
  const float* reduced;
  bool most_recent;
  bool indexed;  // columns are numbered over all states, to index tensors
};

struct Update {
  const float* amax;
  const float* scale;
  float fp8_max;
  float margin_factor;
};

// The number of columns of all states before `state`. All threads of the block get the result.
__device__ __forceinline__ int64_t columns_before(const ScalingEntry* table, unsigned state) {
  __shared__ unsigned parts[kWarps];
  unsigned sum = 0;
  for (unsigned s = threadIdx.x; s < state; s += kThreads)
    sum += static_cast<unsigned>(table[s].count);
  sum = __reduce_add_sync(0xffffffffu, sum);
  if (threadIdx.x % 32 == 0) parts[threadIdx.x / 32] = sum;
  __syncthreads();
  sum = 0;
  for (int warp = 0; warp < kWarps; ++warp) sum += parts[warp];
  return sum;
}

// Returns this thread's part of the largest value of a column, row 0 aside. With kRoll it also
// shifts the history: row 1 is dropped, later rows move by one, and `newest` becomes the last row.
// Row 0 is left to the caller.
template <bool kRoll>
__device__ __forceinline__ float older_amax(float* column, int64_t length, float newest) {
  float amax = length > 1 ? fmaxf(0.0f, column[1]) : 0.0f;
  for (int64_t chunk = 1; chunk < length; chunk += kThreads * kRowsPerThread) {
    float next[kRowsPerThread];
#pragma unroll
    for (int k = 0; k < kRowsPerThread; ++k) {
      const int64_t row = chunk + k * kThreads + threadIdx.x + 1;
      next[k] = row < length ? column[row] : newest;
      if (row < length) amax = fmaxf(amax, next[k]);
    }
    if constexpr (kRoll) {
      __syncthreads();
#pragma unroll
      for (int k = 0; k < kRowsPerThread; ++k)
        if (const int64_t row = chunk + k * kThreads + threadIdx.x; row < length)
          column[row] = next[k];
    }
  }
  return amax;
}

// Calls use(history, entry, column of the state, newest amax, index among all) for each of the
// block's columns; the arguments are the same for all threads.
template <class Use>
__device__ __forceinline__ void each_column(const Columns& args, const Use& use) {
  const ScalingEntry entry = args.table[blockIdx.x];
  const int64_t first = args.indexed ? columns_before(args.table, blockIdx.x) : 0;
  auto* history = reinterpret_cast<float*>(entry.history);
  for (int64_t i = blockIdx.y; i < entry.count; i += kColumnBlocks) {
    const float of_ranks = args.reduced ? args.reduced[first + i] : 0.0f;
    float* const column = history + i * entry.column_stride;
    use(column, entry, i, of_ranks != 0.0f ? of_ranks : column[0], first + i);
  }
}

__device__ __forceinline__ float amax_of(float newest, float older, bool most_recent) {
  const float amax = max_ignoring_nan(newest, 0.0f);
  return most_recent ? amax : max_ignoring_nan(amax, older);
}

__global__ void __launch_bounds__(kThreads)
    update_kernel(const Columns columns, const Update args) {
  follow_previous_kernel();
  __shared__ BlockAmax<kWarps> block_amax;
  each_column(columns, [&](float* column, const ScalingEntry& entry, int64_t i, float newest,
                           int64_t index) {
    if (newest == 0.0f) return;
    block_amax.leave(older_amax<true>(column, entry.length, newest));
    __syncthreads();  // all have read row 0
    if (threadIdx.x == 0) {
      const float amax =
          args.amax ? args.amax[index] : amax_of(newest, block_amax.total(), columns.most_recent);
      float& scale = reinterpret_cast<float*>(entry.scale)[i * entry.scale_stride];
      scale = args.scale ? bounded_scale(args.scale[index], scale)
                         : delayed_scale(amax, scale, args.fp8_max, args.margin_factor);
      column[0] = 0.0f;
    }
    __syncthreads();  // before the next column leaves its amax
  });
}

__global__ void __launch_bounds__(kThreads) gather_kernel(const Columns columns, float* out) {
  follow_previous_kernel();
  __shared__ BlockAmax<kWarps> block_amax;
  each_column(columns, [&](float* column, const ScalingEntry& entry, int64_t, float newest,
                           int64_t index) {
    block_amax.leave(columns.most_recent ? 0.0f : older_amax<false>(column, entry.length, newest));
    __syncthreads();
    if (threadIdx.x == 0) out[index] = amax_of(newest, block_amax.total(), columns.most_recent);
    __syncthreads();
  });
}

Columns columns_of(const TensorView& table, const TensorView& reduced, AmaxAlgorithm algorithm,
                   bool indexed) {
  return {table.ptr<ScalingEntry>(), reduced.ptr<float>(), algorithm == AmaxAlgorithm::MostRecent,
          indexed};
}

dim3 grid_of(const TensorView& table) {
  return {static_cast<unsigned>(table.size(0)), kColumnBlocks};
}

}  // namespace

void delayed_scaling_update(const DelayedScalingArgs& args, Stream stream) {
  if (args.table.size(0) == 0) return;
  const DeviceGuard guard(args.table.device);
  const bool indexed = args.reduced || args.amax || args.scale;
  launch_dependent(update_kernel, grid_of(args.table), kThreads, 0, stream_of(stream),
                   columns_of(args.table, args.reduced, args.algorithm, indexed),
                   Update{.amax = args.amax.ptr<float>(),
                          .scale = args.scale.ptr<float>(),
                          .fp8_max = args.fp8_max,
                          .margin_factor = std::ldexp(1.0f, args.margin)});
}

void gather_amax(const GatherAmaxArgs& args, Stream stream) {
  if (args.table.size(0) == 0) return;
  const DeviceGuard guard(args.table.device);
  launch_dependent(gather_kernel, grid_of(args.table), kThreads, 0, stream_of(stream),
                   columns_of(args.table, args.reduced, args.algorithm, true),
                   args.out.ptr<float>());
}

}  // namespace te::cuda
