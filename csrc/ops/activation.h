// Activations, forward and backward, optionally straight to FP8 with the bias gradient.
//   plain  y = act(x)                 x [..., n]  -> y [..., n]
//   gated  y = act(x1) * x2           x = [x1 | x2], [..., 2n] -> y [..., n]
// Everything is computed in fp32 from x; FP8 results are rounded once, from the fp32 value.
#pragma once

#include "core/quantized_view.h"

namespace te {

// The numbers are part of the Python binding.
enum class ActivationKind : int32_t {
  Gelu = 0,     // tanh form
  Geglu = 1,
  Qgelu = 2,    // x * sigmoid(1.702 x)
  Qgeglu = 3,
  Relu = 4,
  Reglu = 5,
  Srelu = 6,    // relu(x)^2
  Sreglu = 7,
  Silu = 8,
  Swiglu = 9,
};

constexpr bool is_gated(ActivationKind kind) { return static_cast<int32_t>(kind) % 2 == 1; }

struct ActivationForwardArgs {
  ActivationKind kind = ActivationKind::Gelu;
  TensorView x;             // [..., n] or [..., 2n], contiguous
  TensorView y;             // [..., n], plain result; may be absent
  QuantizedView quantized;  // FP8 result; may be absent
  CurrentScale current;     // scale of y as rounded to y's dtype; needs y
};

struct ActivationBackwardArgs {
  ActivationKind kind = ActivationKind::Gelu;
  TensorView dy;            // [..., n]
  TensorView x;             // [..., n] or [..., 2n]: what forward read
  TensorView dx;            // shape of x, plain result; may be absent
  QuantizedView quantized;  // FP8 of dx from the fp32 value; may be absent
  CurrentScale current;     // scale of dx as rounded to dx's dtype; needs dx
  TensorView dbias;         // [n or 2n]: column sums of the fp32 dx; may be absent
  TensorView workspace;     // column_sum_workspace_bytes(); where dbias is given
};

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
