// RowSink: the outputs of a CPU op that computes rows of fp32 values. A row is rounded to the plain
// tensor, cast to FP8 codes, and its amax is taken for the next scale. Any of these may be absent.
#pragma once

#include <algorithm>
#include <vector>

#include "core/quantized_view.h"
#include "cpu/parallel_max.h"

namespace te::cpu {

class RowSink {
 public:
  // Reads the scale of delayed scaling, and writes its pair {1 / scale, scale}.
  RowSink(int64_t rows, int64_t cols, const TensorView& plain, const QuantizedView& quantized,
          const CurrentScale& current);

  // Writes a row; threads may write different rows at once. Returns max |value|, NaN ignored, if an
  // amax was requested, else 0. With current scaling it is that of the values as rounded to the
  // plain dtype, else that of the fp32 values.
  float write(int64_t row, const std::vector<float>& values) const;

  // Writes all rows: compute(row, values) fills one. Threads take `grain` rows or more.
  template <class Compute>
  void write_all(int64_t grain, Compute&& compute) const {
    finish(parallel_max(rows_, grain, [&](int64_t first, int64_t last) {
      std::vector<float> values(static_cast<size_t>(cols_));
      float amax = 0.0f;
      for (int64_t row = first; row < last; ++row) {
        compute(row, values);
        amax = std::max(amax, write(row, values));
      }
      return amax;
    }));
  }

  // To be called after all rows, with the largest result of write(): updates the amax of delayed
  // scaling, or stores the amax and the scale of current scaling.
  void finish(float amax) const;

 private:
  int64_t rows_, cols_;
  TensorView plain_;
  QuantizedView quantized_;
  CurrentScale current_;
  float scale_ = 1.0f;
};

// Stores the amax of a tensor and the scale that follows from it, as far as they are requested.
void keep_current(const CurrentScale& rule, float amax);

}  // namespace te::cpu
