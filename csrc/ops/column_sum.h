// Column sums (bias, gamma and beta gradients) in two deterministic stages: each block writes the
// fp32 sums of its rows, and a second kernel adds these partial sums in order. Ops run both stages,
// or leave the second one to their caller, who runs it once for many ops.
#pragma once

#include <cstdint>
#include <vector>

#include "core/tensor_view.h"

namespace te {

// The least number of rows over which a kernel takes one partial sum.
inline constexpr int64_t kRowsPerColumnPart = 32;

constexpr int64_t column_sum_workspace_bytes(int64_t rows, int64_t cols) {
  return (rows + kRowsPerColumnPart - 1) / kRowsPerColumnPart * cols * 4;
}

// out[j] = sum over p < count of parts[p * pitch + j], in order, in fp32, rounded to the dtype of
// out.
struct ColumnSum {
  const float* parts = nullptr;
  int64_t count = 0;
  int64_t pitch = 0;  // at least out.numel()
  TensorView out;     // [cols], fp32, fp16 or bf16, on a GPU
};

using ColumnSums = std::vector<ColumnSum>;

// Where an op leaves its partial sums.
struct ColumnSumWorkspace {
  TensorView memory;            // column_sum_workspace_bytes(); absent on the CPU
  ColumnSums* later = nullptr;  // to which the op adds its sums; null: the op runs both stages
};

namespace cuda {
// The second stage of all these sums, of which there is at least one. They are on one device.
void add_column_parts(const ColumnSums& sums, Stream stream);
}  // namespace cuda

}  // namespace te
