// A block per column of a state: 288 states update side by side in one launch. Histories are rolled
// in place; every chunk is read by the whole block before any of it is written.
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
constexpr int kColumnBlocks = 8;   // blocks per state; one with more columns takes turns

struct Update {
  const ScalingEntry* table;
  const float* reduced;
  bool most_recent;
  float fp8_max;
  float margin_factor;
};

// Columns of all states before this block's. All threads of the block get the result.
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

// Drops row 1, moves the others up and puts `newest` at the end. Returns the thread's part of the
// largest value that was there, row 0 aside. Row 0 is left to the caller.
__device__ __forceinline__ float roll(float* column, int64_t length, float newest) {
  float amax = length > 1 ? fmaxf(0.0f, column[1]) : 0.0f;
  for (int64_t chunk = 1; chunk < length; chunk += kThreads * kRowsPerThread) {
    float next[kRowsPerThread];
#pragma unroll
    for (int k = 0; k < kRowsPerThread; ++k) {
      const int64_t row = chunk + k * kThreads + threadIdx.x + 1;
      next[k] = row < length ? column[row] : newest;
      if (row < length) amax = fmaxf(amax, next[k]);
    }
    __syncthreads();
#pragma unroll
    for (int k = 0; k < kRowsPerThread; ++k)
      if (const int64_t row = chunk + k * kThreads + threadIdx.x; row < length)
        column[row] = next[k];
  }
  return amax;
}

__global__ void __launch_bounds__(kThreads) update_kernel(const Update args) {
  follow_previous_kernel();
  __shared__ BlockAmax<kWarps> block_amax;
  const ScalingEntry entry = args.table[blockIdx.x];
  if (blockIdx.y >= entry.count) return;
  auto* history = reinterpret_cast<float*>(entry.history);
  auto* scale = reinterpret_cast<float*>(entry.scale);
  const int64_t first = args.reduced ? columns_before(args.table, blockIdx.x) : 0;
  for (int64_t i = blockIdx.y; i < entry.count; i += kColumnBlocks) {
    const float reduced = args.reduced ? args.reduced[first + i] : 0.0f;
    float* const column = history + i * entry.column_stride;
    const float newest = reduced != 0.0f ? reduced : column[0];
    if (newest == 0.0f) continue;  // the same for all threads of the block
    const float older = roll(column, entry.length, newest);
    block_amax.leave(older);
    __syncthreads();  // all have read row 0
    if (threadIdx.x == 0) {
      const float amax = args.most_recent ? newest : fmaxf(newest, block_amax.total());
      float& factor = scale[i * entry.scale_stride];
      factor = delayed_scale(amax, factor, args.fp8_max, args.margin_factor);
      column[0] = 0.0f;
    }
    __syncthreads();  // before the next column leaves its amax
  }
}

__global__ void __launch_bounds__(kThreads) gather_kernel(const ScalingEntry* table, float* out) {
  follow_previous_kernel();
  const int64_t first = columns_before(table, blockIdx.x);
  const auto* history = reinterpret_cast<const float*>(table[blockIdx.x].history);
  for (int64_t i = threadIdx.x; i < table[blockIdx.x].count; i += kThreads)
    out[first + i] = history[i * table[blockIdx.x].column_stride];
}

}  // namespace

void delayed_scaling_update(const DelayedScalingArgs& args, Stream stream) {
  if (args.table.size(0) == 0) return;
  const DeviceGuard guard(args.table.device);
  const dim3 grid(static_cast<unsigned>(args.table.size(0)), kColumnBlocks);
  launch_dependent(update_kernel, grid, kThreads, 0, stream_of(stream),
                   Update{.table = args.table.ptr<ScalingEntry>(),
                          .reduced = args.reduced.ptr<float>(),
                          .most_recent = args.algorithm == AmaxAlgorithm::MostRecent,
                          .fp8_max = args.fp8_max,
                          .margin_factor = std::ldexp(1.0f, args.margin)});
}

void gather_amax(const GatherAmaxArgs& args, Stream stream) {
  if (args.table.size(0) == 0) return;
  const DeviceGuard guard(args.table.device);
  launch_dependent(gather_kernel, static_cast<unsigned>(args.table.size(0)), kThreads, 0,
                   stream_of(stream), args.table.ptr<ScalingEntry>(), args.out.ptr<float>());
}

}  // namespace te::cuda
