// moments: computes all statistics of a tensor in one pass. The result is merged into a row on the
// tensor's device (core/moments.h), so that micro-batches add up without the host.
// cast_moments: the same for the errors of a cast to FP8, from a tensor and its codes and scales.
// merge_rows: merges existing rows of any kind into others.
// If the device flag `active` is 0, an op does nothing. So statistics can be switched on and off in
// captured CUDA graphs.
#pragma once

#include <algorithm>
#include <cstdint>

#include "core/moments.h"
#include "core/tensor_view.h"

namespace te {

// The memory for moments that an op takes of its result or input.
struct MomentsSink {
  TensorView row;        // float64 [16], merged into; absent: no moments
  TensorView active;     // int32 [1]; absent: always
  TensorView workspace;  // moments_workspace_bytes(), zero at first use; absent on the CPU

  explicit operator bool() const { return static_cast<bool>(row); }
};

struct MomentsArgs {
  TensorView x;  // any shape, fp32/fp16/bf16, contiguous
  MomentsSink out;
};

struct CastMomentsArgs {
  TensorView x;      // any shape, fp32/fp16/bf16, contiguous
  TensorView codes;  // its FP8 codes, row-wise, same shape
  DType format = DType::Float8E4M3;
  TensorView scales;          // fp32 [2]: {1 / scale, scale}
  MomentsSink out;            // `row` is float64 [8]
  bool squared_error = true;  // false: it becomes NaN in the row, and most of x need not be read
};

struct MergeRowsArgs {
  TensorView rows;    // float64 [n, slots, 16], contiguous; merged in this order
  TensorView kinds;   // int64 [slots]: RowKind
  TensorView into;    // float64 [slots, 16], contiguous
  TensorView active;  // int32 [1]; absent: always
};

// The workspace of moments and cast_moments: a counter, and a row for each block of the largest
// grid.
inline constexpr int kMomentsBlocks = 384;
constexpr int64_t moments_workspace_bytes() {
  return static_cast<int64_t>(sizeof(Moments)) * (1 + kMomentsBlocks);
}

// The workspace of another op that also takes moments: the same, more counters, and nine sums and
// extremes for each tile of its value.
constexpr int64_t tile_moments_bytes(int64_t tiles) {
  constexpr int64_t kSums = 9;
  return moments_workspace_bytes() + int64_t{kMomentsBlocks} * 4 + tiles * kSums * 8;
}

// The same for a [rows, cols] value, whether the op has a block for each tile of 128 x 128 values
// or up to kMomentsBlocks persistent blocks.
constexpr int64_t tile_moments_workspace_bytes(int64_t rows, int64_t cols) {
  constexpr int64_t kTile = 128;
  const int64_t tiles = ((rows + kTile - 1) / kTile) * ((cols + kTile - 1) / kTile);
  return tile_moments_bytes(std::max<int64_t>(tiles, kMomentsBlocks));
}

void moments(const MomentsArgs& args, Stream stream);
void cast_moments(const CastMomentsArgs& args, Stream stream);
void merge_rows(const MergeRowsArgs& args, Stream stream);

namespace cpu {
void moments(const MomentsArgs& args);
void cast_moments(const CastMomentsArgs& args);
void merge_rows(const MergeRowsArgs& args);
}  // namespace cpu
namespace cuda {
void moments(const MomentsArgs& args, Stream stream);
void cast_moments(const CastMomentsArgs& args, Stream stream);
void merge_rows(const MergeRowsArgs& args, Stream stream);
}  // namespace cuda

}  // namespace te
