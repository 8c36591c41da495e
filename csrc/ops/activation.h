// Activations, forward and backward. Results may be plain tensors or FP8 codes, and the backward
// can sum the bias gradient in the same pass.
//   plain  y = act(x)                 x [..., n]  -> y [..., n]
//   gated  y = act(x1) * h(x2)        x = [x1 | x2], [..., 2n] -> y [..., n]
// Everything is computed in fp32 from x; FP8 results are rounded once, from the fp32 value. All
// plain tensors of one call have the dtype of x. Delayed scaling (`quantized`) and current scaling
// (`current`) exclude each other.
#pragma once

#include "core/activation_math.h"
#include "core/quantized_view.h"
#include "ops/column_sum.h"
#include "ops/moments.h"

namespace te {

struct ActivationForwardArgs {
  ActivationKind kind = ActivationKind::Gelu;
  ActivationParameters parameters;
  TensorView x;             // [..., n] or [..., 2n], fp32/fp16/bf16, contiguous
  TensorView y;             // [..., n], plain result; may be absent
  QuantizedView quantized;  // FP8 result; may be absent
  CurrentScale current;     // scale of y as rounded to its dtype; needs y; may be absent
  MomentsSink moments;      // of y as rounded to its dtype; may be absent
};

// The result of forward, which the backward can compute again from x, for the wgrad of a GEMM that
// did not save it: either plain, or as column-wise (transposed) FP8 codes.
struct ActivationAgain {
  TensorView y;             // [..., n], dtype of x; may be dy itself
  QuantizedView quantized;  // if y is absent: only the column-wise codes; `scales` are read
  bool rounded = false;     // whether y is rounded to the dtype of x before the cast, as in current
                            // scaling

  explicit operator bool() const { return y || quantized; }
};

struct ActivationBackwardArgs {
  ActivationKind kind = ActivationKind::Gelu;
  ActivationParameters parameters;
  TensorView dy;                 // [..., n]
  TensorView x;                  // [..., n] or [..., 2n]: what forward read
  TensorView dx;                 // shape of x, plain result; may be absent
  QuantizedView quantized;       // FP8 of dx from the fp32 value; may be absent
  CurrentScale current;          // scale of dx as rounded to its dtype; needs dx; may be absent
  TensorView dbias;              // [n or 2n]: column sums of the fp32 dx; may be absent
  ColumnSumWorkspace workspace;  // only with dbias
  MomentsSink moments;           // of dx as rounded to its dtype; may be absent
  ActivationAgain again;         // may be absent; excludes moments
};

// Whether the kernels for these tensors can take moments of their result without a plain result: of
// y in the forward (where dy is absent), of dx in the backward.
bool activation_takes_moments(const TensorView& x, const TensorView& dy);

void activation_forward(const ActivationForwardArgs& args, Stream stream);
void activation_backward(const ActivationBackwardArgs& args, Stream stream);

namespace cpu {
void activation_forward(const ActivationForwardArgs& args);
void activation_backward(const ActivationBackwardArgs& args);
}  // namespace cpu
namespace cuda {
void activation_forward(const ActivationForwardArgs& args, Stream stream);
void activation_backward(const ActivationBackwardArgs& args, Stream stream);
}  // namespace cuda

}  // namespace te
