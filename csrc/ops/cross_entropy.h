// Cross entropy of logits with a class of each row, in fp32. Ranks may have parts of the classes:
// what a row's loss is made of can be merged, and the gradient takes the merged logarithm.
//   largest = max_j x[j];  total = sum_j exp(x[j] - largest);  picked = x[label] - largest;
//   spread = sum_j (x[j] - largest)
//   dx[j] = factor * (exp(x[j] - log_sum) - evenly - (1 - smoothing) * [j == label])
//   codes: dx in FP8, rounded once, with a scale that is there
//   A label counts from this tensor's first class. kElsewhere, or any other number that is none of
//   them: picked is NaN. kIgnored: picked and dx are 0. Where largest is -Inf, 0 is subtracted.
#pragma once

#include "core/quantized_view.h"

namespace te {

constexpr int kElsewhere = -1;
constexpr int kIgnored = -2;

struct CrossEntropyForwardArgs {
  TensorView logits;  // [rows, classes], fp32/fp16/bf16, contiguous
  TensorView labels;  // [rows], int32
  TensorView sums;    // [4, rows], fp32: largest, total, picked, spread
};

struct CrossEntropyBackwardArgs {
  TensorView logits;    // [rows, classes]
  TensorView labels;    // [rows]
  TensorView log_sums;  // [rows], fp32: log(total) + largest, of all ranks' classes
  TensorView factors;   // [rows], fp32, of each row's gradient; absent: 1
  float smoothing = 0.0f;
  float evenly = 0.0f;  // smoothing / all ranks' classes
  TensorView dx;  // shape and dtype of logits; may be logits itself, or absent where codes are
  QuantizedView codes;  // of dx; may be absent
};

void cross_entropy_forward(const CrossEntropyForwardArgs& args, Stream stream);
void cross_entropy_backward(const CrossEntropyBackwardArgs& args, Stream stream);

namespace cpu {
void cross_entropy_forward(const CrossEntropyForwardArgs& args);
void cross_entropy_backward(const CrossEntropyBackwardArgs& args);
}  // namespace cpu
namespace cuda {
void cross_entropy_forward(const CrossEntropyForwardArgs& args, Stream stream);
void cross_entropy_backward(const CrossEntropyBackwardArgs& args, Stream stream);
}  // namespace cuda

}  // namespace te
