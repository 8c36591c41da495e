// moments: one pass over a tensor for all its statistics. The result is merged into a row on the
// tensor's device (core/moments.h), so that micro-batches add up without the host.
// cast_moments: the same for what FP8 has made of a tensor; codes and scales are those of its cast.
// merge_rows: rows that are there already, of any kind.
// Where `active` holds 0, nothing happens: a schedule that captured graphs can follow.
#pragma once

#include <algorithm>
#include <cstdint>

#include "core/moments.h"
#include "core/tensor_view.h"

namespace te {

// Where an op leaves the moments of the value that it produces or reads.
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
  bool squared_error = true;  // false: the row's is left NaN, and counts may come from codes alone
};

struct MergeRowsArgs {
  TensorView rows;    // float64 [n, slots, 16], contiguous; merged in this order
  TensorView kinds;   // int64 [slots]: RowKind
  TensorView into;    // float64 [slots, 16], contiguous
  TensorView active;  // int32 [1]; absent: always
};

// One counter, and a row for each block of the largest grid.
inline constexpr int kMomentsBlocks = 384;
constexpr int64_t moments_workspace_bytes() {
  return static_cast<int64_t>(sizeof(Moments)) * (1 + kMomentsBlocks);
}

// Where an op takes moments of a value beside its work: counters, and sums of tiles.
constexpr int64_t tile_moments_bytes(int64_t tiles) {
  constexpr int64_t kSums = 9;
  return moments_workspace_bytes() + int64_t{kMomentsBlocks} * 4 + tiles * kSums * 8;
}

// The same for a [rows, cols] value: of tiles of 128 x 128, or of blocks that stay.
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
