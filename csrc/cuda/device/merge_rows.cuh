// How rows of statistics (core/moments.h) become one: warps of a block, and the blocks of a grid,
// whose last one merges what all have left, always in the same order.
//
// A row on its way is a few fields of float64, some of which add up, while of the others the least
// counts. Each warp reduces a field of its own.
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
  unsigned* ticket = nullptr;  // the workspace: a counter, then the fields of all blocks
  double* fields = nullptr;    // [field][kMomentsBlocks]

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

// Values of a field, which are value(i) for i < count, a warp's lanes taking turns; the result is
// that of all lanes.
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

// Whoever draws the last ticket sees what the others' blocks have written before their barrier.
__device__ __forceinline__ unsigned draw(unsigned* ticket) {
  unsigned drawn;
  asm volatile("atom.add.acq_rel.gpu.global.u32 %0, [%1], 1;"
               : "=r"(drawn)
               : "l"(__cvta_generic_to_global(ticket))
               : "memory");
  return drawn;
}

// Ends a kernel: the last block merges what all warps have found. Every thread calls it with its
// warp's fields, of which the first kSums add up; then finish(fields of the grid, row) is called by
// one thread, to merge them into the row of the sink.
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
  // The compiler then knows that a warp does not part.
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
