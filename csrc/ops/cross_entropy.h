// Cross entropy of logits with one label for each row, in fp32. Each rank may have a part of the
// classes (a vocabulary that is split over ranks): the forward writes four numbers for each row,
// which ranks can merge, and the backward takes the merged log-sum-exp.
//   largest = max_j x[j];  total = sum_j exp(x[j] - largest);  picked = x[label] - largest;
//   spread = sum_j (x[j] - largest)
//   dx[j] = factor * (exp(x[j] - log_sum) - evenly - (1 - smoothing) * [j == label])
//   codes: dx in FP8, rounded once, with the scale that is in `scales` before the call
//   Labels count from the first class of this tensor. If the label is none of its classes
//   (kElsewhere, for instance), picked is NaN. If it is kIgnored, picked and dx are 0. If largest
//   is -Inf, 0 is subtracted instead.
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
  TensorView factors;   // [rows], fp32: factor of each row's gradient; absent: 1
  float smoothing = 0.0f;
  float evenly = 0.0f;  // smoothing / number of classes of all ranks
  TensorView dx;  // shape and dtype of logits; may be logits itself, or absent if there are codes
  QuantizedView codes;  // of dx; may be absent; column-wise codes may be columns of a larger matrix
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
