// Reduces rows of statistics (core/moments.h) over a grid, in one launch. The warps of a block
// merge their rows in shared memory, the block writes the result to global memory, and the last
// block to finish merges the results of all blocks. The order of the merges is always the same, and
// so is the result.
//
// Here a row is a list of float64 fields: first those that are summed, then those of which the
// minimum is taken (a maximum is negated). Each warp reduces fields of its own.
#pragma once

#include "core/moments.h"
#include "cuda/launch.h"
#include "ops/moments.h"

namespace te::cuda {

// Device-side form of MomentsSink.
template <class Row>
struct RowSink {
  Row* row = nullptr;
  const int* active = nullptr;
  unsigned* ticket = nullptr;  // start of the workspace, a counter of finished blocks
  double* fields = nullptr;    // [field][kMomentsBlocks]: the results of the blocks

  __device__ __forceinline__ bool is_idle() const { return active && *active == 0; }
};

template <class Row>
RowSink<Row> row_sink_of(const MomentsSink& sink) {
  auto* first = sink.workspace.ptr<Moments>();
  return {sink.row.ptr<Row>(), sink.active.ptr<int>(), reinterpret_cast<unsigned*>(first),
          reinterpret_cast<double*>(first + 1)};
}

__device__ __forceinline__ double warp_add(double value) {
#pragma unroll
  for (int offset = 16; offset > 0; offset /= 2)
    value += __shfl_xor_sync(0xffffffffu, value, offset);
  return value;
}
__device__ __forceinline__ double warp_min(double value) {  // NaN ignored
#pragma unroll
  for (int offset = 16; offset > 0; offset /= 2)
    value = fmin(value, __shfl_xor_sync(0xffffffffu, value, offset));
  return value;
}

__device__ __forceinline__ MomentSums warp_add(const MomentSums& sums) {
  return {warp_add(sums.count),    warp_add(sums.first),    warp_add(sums.second),
          warp_add(sums.sum_abs),  warp_min(sums.min),      -warp_min(-sums.max),
          warp_min(sums.smallest), warp_add(sums.nonzeros), warp_add(sums.nans),
          warp_add(sums.infs)};
}

// Reduces value(0) to value(count - 1), one field of `count` rows, to their sum or minimum. The
// lanes of a warp take the values in turn, and all lanes get the result.
template <int kMost, class F>
__device__ __forceinline__ double merge_field(bool adds, int count, F&& value) {
  const int lane = static_cast<int>(threadIdx.x) % 32;
  double mine[ceil_div(kMost, 32)];
#pragma unroll
  for (int k = 0; k < ceil_div(kMost, 32); ++k) {
    const int i = 32 * k + lane;
    mine[k] = i < count ? value(i) : adds ? 0.0 : kInfinity;
  }
  if (adds) {
#pragma unroll
    for (int k = 1; k < ceil_div(kMost, 32); ++k) mine[0] += mine[k];
    return warp_add(mine[0]);
  }
#pragma unroll
  for (int k = 1; k < ceil_div(kMost, 32); ++k) mine[0] = fmin(mine[0], mine[k]);
  return warp_min(mine[0]);
}

// Draws the next number. The block that draws the last one sees what the other blocks have written
// before the barrier that precedes their draw.
__device__ __forceinline__ unsigned draw(unsigned* ticket) {
  unsigned drawn;
  asm volatile("atom.add.acq_rel.gpu.global.u32 %0, [%1], 1;"
               : "=r"(drawn)
               : "l"(__cvta_generic_to_global(ticket))
               : "memory");
  return drawn;
}

// Ends a kernel: the last block merges the fields of all warps. Every thread calls it with the
// fields of its warp, the first kSums of which are summed. Then one thread calls finish(fields of
// the grid, row), which merges them into `row`, a copy of the sink's row that is written back.
template <int kWarps, int kSums, int kFields, class Row, class F>
__device__ __forceinline__ void merge_grid(const double (&of_warp)[kFields],
                                           const RowSink<Row>& sink, F&& finish) {
  constexpr int kRowFields = sizeof(Row) / sizeof(double);
  static_assert(kWarps <= 32 && kRowFields <= 32);
  static_assert(kFields * sizeof(double) <= sizeof(Moments));
  __shared__ double fields[kFields][kWarps], total[kFields];
  __shared__ Row row;
  __shared__ bool is_last;
  const int lane = static_cast<int>(threadIdx.x) % 32;
  // A shuffle tells the compiler that the number is the same in all lanes: no warp diverges.
  const int warp = __shfl_sync(0xffffffffu, static_cast<int>(threadIdx.x) / 32, 0);
  if (lane == 0) {
#pragma unroll
    for (int i = 0; i < kFields; ++i) fields[i][warp] = of_warp[i];
  }
  __syncthreads();
  for (int field = warp; field < kFields; field += kWarps) {
    const double found =
        merge_field<kWarps>(field < kSums, kWarps, [&](int i) { return fields[field][i]; });
    if (lane == 0) sink.fields[field * kMomentsBlocks + blockIdx.x] = found;
  }
  __syncthreads();
  if (threadIdx.x == 0) is_last = draw(sink.ticket) == gridDim.x - 1;
  __syncthreads();
  if (!is_last) return;
  if (warp == kWarps - 1 && lane < kRowFields)
    reinterpret_cast<double*>(&row)[lane] = reinterpret_cast<const double*>(sink.row)[lane];
  for (int field = warp; field < kFields; field += kWarps) {
    const double* theirs = sink.fields + field * kMomentsBlocks;
    const double found = merge_field<kMomentsBlocks>(field < kSums, static_cast<int>(gridDim.x),
                                                     [&](int i) { return __ldcg(theirs + i); });
    if (lane == 0) total[field] = found;
  }
  __syncthreads();
  if (threadIdx.x != 0) return;
  finish(total, row);
  *sink.row = row;
  *sink.ticket = 0;
}

}  // namespace te::cuda
