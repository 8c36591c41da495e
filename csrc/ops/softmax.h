// Scaled, masked softmax over the last axis of attention scores, forward and backward, in fp32.
//   y = softmax(scale * x) over the keys that a query sees; every other key is exactly zero.
//   Key j is seen by query i when mask[b, h, i, j] is false (True = masked out) and lies in the
//   query's window (core/attention_window.h). causal: left = -1, right = 0.
//   A row that sees no key, or only keys of score -Inf, is exactly zero, and so is its gradient.
//   A score of NaN or +Inf among the keys that a query sees makes its whole row NaN.
#pragma once

#include "core/attention_window.h"
#include "core/tensor_view.h"

namespace te {

struct SoftmaxForwardArgs {
  TensorView x;     // [batch, heads, queries, keys], fp32/fp16/bf16, contiguous
  TensorView mask;  // bool, expanded to the sizes of x (stride 0 repeats); may be absent
  float scale = 1.0f;
  AttentionWindow window;
  TensorView y;  // shape and dtype of x; may be x itself
};

struct SoftmaxBackwardArgs {
  TensorView dy;  // [batch, heads, queries, keys]
  TensorView y;   // forward's result, dtype of dy
  float scale = 1.0f;
  TensorView dx;  // scale * y * (dy - sum(dy * y)); may be dy or y itself
};

void softmax_forward(const SoftmaxForwardArgs& args, Stream stream);
void softmax_backward(const SoftmaxBackwardArgs& args, Stream stream);

namespace cpu {
void softmax_forward(const SoftmaxForwardArgs& args);
void softmax_backward(const SoftmaxBackwardArgs& args);
}  // namespace cpu
namespace cuda {
void softmax_forward(const SoftmaxForwardArgs& args, Stream stream);
void softmax_backward(const SoftmaxBackwardArgs& args, Stream stream);
}  // namespace cuda

}  // namespace te
