// Where a CPU op puts its rows of fp32 results: the plain tensor, FP8 codes, and the amax behind
// their scales. Any of them may be absent.
#pragma once

#include <vector>

#include "core/quantized_view.h"

namespace te::cpu {

class RowSink {
 public:
  // Reads the scale; writes the pair of delayed scaling.
  RowSink(int64_t rows, int64_t cols, const TensorView& plain, const QuantizedView& quantized,
          const CurrentScale& current);

  // Threads may write different rows at once. Returns max |value|, NaN ignored, if anyone asks: of
  // the values as rounded to the plain dtype with current scaling, else of the fp32 values.
  float write(int64_t row, const std::vector<float>& values) const;

  // Once all rows are written: keeps the largest result of write(), or the scales it gives.
  void finish(float amax) const;

 private:
  int64_t rows_, cols_;
  TensorView plain_;
  QuantizedView quantized_;
  CurrentScale current_;
  float scale_ = 1.0f;
};

}  // namespace te::cpu
