// Scaled, masked softmax over the last axis of attention scores, forward and backward, in fp32.
//   y = softmax(scale * x) over the keys a query may see; a row that sees none is exactly zero.
//   Key j is seen by query i when mask[b, h, i, j] is false (True = masked out) and
//   i + diagonal - left <= j <= i + diagonal + right (a negative side is unlimited).
//   causal: left = -1, right = 0.
#pragma once

#include "core/tensor_view.h"

namespace te {

struct SoftmaxForwardArgs {
  TensorView x;     // [batch, heads, queries, keys], fp32/fp16/bf16, contiguous
  TensorView mask;  // bool, broadcastable to x by stride 0 (sizes expanded); may be absent
  float scale = 1.0f;
  int64_t left = -1;
  int64_t right = -1;
  int64_t diagonal = 0;
  TensorView y;     // shape and dtype of x; may be x itself
};

struct SoftmaxBackwardArgs {
  TensorView dy;  // [batch, heads, queries, keys]
  TensorView y;   // forward's result
  float scale = 1.0f;
  TensorView dx;  // scale * y * (dy - sum(dy * y)); may be dy itself
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
