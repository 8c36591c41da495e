// Column sums for bias gradients on the CPU: fp32 values are summed in fp64 and rounded once.
#pragma once

#include <algorithm>
#include <vector>

#include "core/parallel.h"
#include "core/tensor_view.h"

namespace te::cpu {

// out[j] = sum over i of value(i, j), for a [rows, cols] matrix. Threads share the columns.
template <class Value>
void column_sum(const TensorView& out, int64_t rows, int64_t cols, Value&& value) {
  const int64_t grain = std::max<int64_t>(16, (1 << 17) / std::max<int64_t>(1, rows));
  parallel_for(cols, grain, [&](int64_t first, int64_t last) {
    std::vector<double> sums(static_cast<size_t>(last - first), 0.0);
    for (int64_t i = 0; i < rows; ++i)
      for (int64_t j = first; j < last; ++j)
        sums[static_cast<size_t>(j - first)] += static_cast<double>(value(i, j));
    dispatch_high_precision(out.dtype, "column_sum", [&](auto tag) {
      using Out = typename decltype(tag)::type;
      for (int64_t j = first; j < last; ++j)
        out.ptr<Out>()[j] = Out(static_cast<float>(sums[static_cast<size_t>(j - first)]));
    });
  });
}

// The column sums of a tensor of fp32, fp16 or bf16.
inline void column_sum(const TensorView& out, const TensorView& x) {
  dispatch_high_precision(x.dtype, "column_sum", [&](auto tag) {
    const auto* values = x.ptr<typename decltype(tag)::type>();
    const int64_t cols = x.cols();
    column_sum(out, x.rows(), cols,
               [&](int64_t i, int64_t j) { return static_cast<float>(values[i * cols + j]); });
  });
}

}  // namespace te::cpu
