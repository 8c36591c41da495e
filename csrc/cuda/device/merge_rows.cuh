// How rows of statistics (core/moments.h) become one: lanes of a warp, warps of a block, and the
// blocks of a grid, whose last one merges what all have left, always in the same order.
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
  unsigned* ticket = nullptr;  // the workspace: a counter, then a row per block
  Row* blocks = nullptr;

  __device__ __forceinline__ bool is_idle() const { return active && *active == 0; }
};

template <class Row>
RowSink<Row> row_sink_of(const MomentsSink& sink) {
  auto* first = sink.workspace.ptr<Moments>();
  return {sink.row.ptr<Row>(), sink.active.ptr<int>(), reinterpret_cast<unsigned*>(first),
          reinterpret_cast<Row*>(first + 1)};
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
__device__ __forceinline__ double warp_max(double value) { return -warp_min(-value); }

__device__ __forceinline__ MomentSums warp_add(const MomentSums& sums) {
  return {warp_add(sums.count),    warp_add(sums.first),    warp_add(sums.second),
          warp_add(sums.sum_abs),  warp_min(sums.min),      warp_max(sums.max),
          warp_min(sums.smallest), warp_add(sums.nonzeros), warp_add(sums.nans),
          warp_add(sums.infs)};
}

// All lanes get the result. The first lane's mean is the pivot.
__device__ __forceinline__ Moments merge_warp(const Moments& row) {
  const double pivot = pivot_from(__shfl_sync(0xffffffffu, row.mean, 0));
  return warp_add(MomentSums::of(row, pivot)).about(pivot);
}

__device__ __forceinline__ CastMoments merge_warp(const CastMoments& row) {
  return {warp_add(row.count),
          warp_add(row.underflows),
          warp_add(row.overflows),
          warp_add(row.squared_error),
          warp_min(row.min_scale_inv),
          warp_max(row.max_scale_inv),
          {0, 0}};
}

// Rows of a block, one per warp. Every thread calls it with its warp's row; thread 0's result is
// that of the block. `rows`: shared, one per warp; may be reused after the next __syncthreads.
template <int kWarps, class Row>
__device__ __forceinline__ Row merge_block(const Row& warp_row, Row* rows) {
  static_assert(kWarps <= 32);
  const int lane = static_cast<int>(threadIdx.x) % 32, warp = static_cast<int>(threadIdx.x) / 32;
  if (lane == 0) rows[warp] = warp_row;
  __syncthreads();
  if (warp != 0) return warp_row;
  return merge_warp(lane < kWarps ? rows[lane] : Row::empty());
}

// A row that another multiprocessor has written in this launch.
template <class Row>
__device__ __forceinline__ Row load_row(const Row* from) {
  Row row;
  constexpr int kPairs = sizeof(Row) / sizeof(double2);
  double2 pairs[kPairs];
#pragma unroll
  for (int i = 0; i < kPairs; ++i) pairs[i] = __ldcg(reinterpret_cast<const double2*>(from) + i);
  static_assert(sizeof(pairs) == sizeof(Row));
  memcpy(&row, pairs, sizeof(row));
  return row;
}

// Ends a kernel of at most kWarps * 32 blocks: the last block merges the rows of all blocks into
// the sink. Every thread calls it with its warp's row.
template <int kWarps, class Row>
__device__ __forceinline__ void merge_grid(const Row& warp_row, const RowSink<Row>& sink) {
  __shared__ Row rows[kWarps];
  __shared__ bool is_last;
  const Row row = merge_block<kWarps>(warp_row, rows);
  if (threadIdx.x == 0) {
    sink.blocks[blockIdx.x] = row;
    __threadfence();
    is_last = atomicAdd(sink.ticket, 1u) == gridDim.x - 1;
  }
  __syncthreads();
  if (!is_last) return;
  __threadfence();
  const Row theirs = threadIdx.x < gridDim.x ? load_row(sink.blocks + threadIdx.x) : Row::empty();
  const Row total = merge_block<kWarps>(merge_warp(theirs), rows);
  if (threadIdx.x != 0) return;
  merge(*sink.row, total);
  *sink.ticket = 0;
}

}  // namespace te::cuda
