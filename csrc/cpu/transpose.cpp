// The CPU backend of transpose, which defines its results: see ops/transpose.h. It takes 64 rows at
// a time, column by column: the cache lines that it has read serve the next columns, too, and each
// column is written as up to 64 contiguous bytes.
#include "ops/transpose.h"

#include <algorithm>

#include "core/parallel.h"

namespace te::cpu {
namespace {

void transpose_scales(const TransposeArgs& args) {
  const int64_t rows = args.x.rows(), cols = args.x.cols();
  const ScaleGrid from = scale_grid(ScaleBlocks::Squares, rows, cols);
  const ScaleGrid to = scale_grid(ScaleBlocks::Squares, cols, rows);
  const float* scales = args.scales.ptr<float>();
  float* out = args.out_scales.ptr<float>();
  for (int64_t j = 0; j < to.rows; ++j)
    for (int64_t i = 0; i < to.cols; ++i)
      out[j * to.cols + i] = i < from.rows ? scales[i * from.cols + j] : 0.0f;
}

}  // namespace

void transpose(const TransposeArgs& args) {
  constexpr int64_t kTile = 64, kElementsPerThread = 1 << 17;
  const int64_t rows = args.x.rows(), cols = args.x.cols();
  const uint8_t* x = args.x.ptr<uint8_t>();
  uint8_t* out = args.out.ptr<uint8_t>();
  const int64_t pitch = transpose_pitch(args);
  if (args.scales) transpose_scales(args);
  const int64_t grain = std::max(kTile, kElementsPerThread / std::max<int64_t>(1, rows));
  parallel_for(cols, grain, [&](int64_t first, int64_t last) {
    for (int64_t top = 0; top < rows; top += kTile) {
      const int64_t bottom = std::min(rows, top + kTile);
      for (int64_t j = first; j < last; ++j)
        for (int64_t i = top; i < bottom; ++i) out[j * pitch + i] = x[i * cols + j];
    }
  });
}

}  // namespace te::cpu
