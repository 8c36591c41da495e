// dropout_add: out = residual + keep(x + bias) / (1 - p), the end of each transformer sub-block.
// Whether element i is kept depends on 16 random bits, which are a function of (seed, i)
// (core/philox.h). So the backward draws them again instead of reading a mask. The seed is a device
// tensor, so each replay of a captured graph can have new random bits. An element is kept if its
// bits, as a number in [0, 1), are at least p, which is rounded up to a multiple of 2^-16. Sums and
// products are rounded to fp32 one by one, and the result is rounded to its dtype, so both backends
// give the same bits.
#pragma once

#include "core/tensor_view.h"
#include "ops/column_sum.h"

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
  TensorView dx;                 // dout * keep / (1 - p), any of the three dtypes; may be absent
  TensorView dbias;              // [cols]: column sums of fp32 dx; may be absent
  ColumnSumWorkspace workspace;  // only with dbias
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
