// dropout_add: out = residual + keep(x + bias) / (1 - p), the end of each transformer sub-block.
// The keep decision of element i is a counter-based random number (core/philox.h) of (seed, i):
// the backward draws it again instead of storing a mask. The seed is a device tensor, so a captured
// graph replays with fresh randomness. Element i is kept where its 16 bits of the seed's stream, as
// a number in [0, 1), are at least p, which is rounded up to a multiple of 2^-16. The sums and the
// product are rounded to fp32 each, the result once to its dtype, so both backends give the same
// bits.
#pragma once

#include "core/tensor_view.h"

namespace te {

struct DropoutAddForwardArgs {
  TensorView x;         // [..., cols], fp32/fp16/bf16, contiguous
  TensorView bias;      // [cols], dtype of x; may be absent
  TensorView residual;  // shape of x, any of the three dtypes; may be absent (then 0)
  TensorView seed;      // int64 [1]; may be absent where p == 0
  float p = 0.0f;       // in [0, 1)
  TensorView out;       // shape of x, dtype of residual (any without one); may be the residual
};

struct DropoutAddBackwardArgs {
  TensorView dout;  // [..., cols], fp32/fp16/bf16, contiguous
  TensorView seed;
  float p = 0.0f;
  TensorView dx;         // dout * keep / (1 - p), any of the three dtypes; may be absent
  TensorView dbias;      // [cols]: column sums of fp32 dx; may be absent
  TensorView workspace;  // column_sum_workspace_bytes(); only with dbias
};

void dropout_add_forward(const DropoutAddForwardArgs& args, Stream stream);
void dropout_add_backward(const DropoutAddBackwardArgs& args, Stream stream);

namespace cpu {
void dropout_add_forward(const DropoutAddForwardArgs& args);
void dropout_add_backward(const DropoutAddBackwardArgs& args);
}  // namespace cpu
namespace cuda {
void dropout_add_forward(const DropoutAddForwardArgs& args, Stream stream);
void dropout_add_backward(const DropoutAddBackwardArgs& args, Stream stream);
}  // namespace cuda

}  // namespace te
