// Where a CPU op puts its rows of fp32 results: the plain tensor, FP8 codes, and the amax behind
// their scales. Any of them may be absent.
#pragma once

#include <algorithm>
#include <vector>

#include "core/quantized_view.h"
#include "cpu/parallel_max.h"

namespace te::cpu {

class RowSink {
 public:
  // Reads the scale; writes the pair of delayed scaling.
  RowSink(int64_t rows, int64_t cols, const TensorView& plain, const QuantizedView& quantized,
          const CurrentScale& current);

  // Threads may write different rows at once. Returns max |value|, NaN ignored, if anyone asks: of
  // the values as rounded to the plain dtype with current scaling, else of the fp32 values.
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

  // Once all rows are written: keeps the largest result of write(), or the scales it gives.
  void finish(float amax) const;

 private:
  int64_t rows_, cols_;
  TensorView plain_;
  QuantizedView quantized_;
  CurrentScale current_;
  float scale_ = 1.0f;
};

// Keeps a tensor's amax, where asked for, and the scales that it gives.
void keep_current(const CurrentScale& rule, float amax);

}  // namespace te::cpu
