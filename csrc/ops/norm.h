// LayerNorm and RMSNorm over the last axis, forward and backward; statistics in fp32.
//   LayerNorm  y = (x - mean) * rstd * g + beta,  rstd = 1 / sqrt(var + eps), biased variance
//   RMSNorm    y = x * rstd * g,                  rstd = 1 / sqrt(mean(x^2) + eps)
//   g = gamma, or 1 + gamma with `zero_centered`.
// The forward may emit FP8 from its fp32 registers (one rounding), a plain y, or both.
#pragma once

#include "core/quantized_view.h"
#include "ops/column_sum.h"
#include "ops/moments.h"

namespace te {

enum class NormKind : int32_t { LayerNorm = 0, RMSNorm = 1 };

struct NormForwardArgs {
  NormKind kind = NormKind::LayerNorm;
  TensorView x;      // [..., cols], fp32/fp16/bf16, contiguous
  TensorView gamma;  // [cols], fp32/fp16/bf16
  TensorView beta;   // [cols], dtype of gamma; LayerNorm only
  float epsilon = 1e-5f;
  bool zero_centered = false;
  TensorView y;             // plain result, shape of x, any of the three dtypes; may be absent
  QuantizedView quantized;  // FP8 result from the fp32 value; may be absent
  CurrentScale current;     // scale of y as rounded to y's dtype; needs y and no FP8 result
  TensorView mean;          // fp32 [rows], written; LayerNorm only
  TensorView rstd;          // fp32 [rows], written
  MomentsSink moments;      // of y as rounded to its dtype; may be absent
};

struct NormBackwardArgs {
  NormKind kind = NormKind::LayerNorm;
  TensorView dy;  // shape of x, any of the three dtypes
  TensorView x;   // as in forward
  TensorView gamma;
  TensorView mean;  // LayerNorm only
  TensorView rstd;
  bool zero_centered = false;
  TensorView
      residual_grad;  // added to dx before its rounding; shape and dtype of dx; may be absent
  TensorView dx;      // shape and dtype of x
  TensorView dgamma;  // [cols], dtype of gamma
  TensorView dbeta;   // [cols], LayerNorm only
  ColumnSumWorkspace workspace;  // of 2 * cols columns
};

void norm_forward(const NormForwardArgs& args, Stream stream);
void norm_backward(const NormBackwardArgs& args, Stream stream);

// Whether the kernel that writes column-wise (transposed) FP8 codes for these tensors can take the
// moments of y, in the dtype of x, without writing y.
bool norm_takes_moments(const TensorView& x, const TensorView& gamma, const TensorView& beta);

namespace cpu {
void norm_forward(const NormForwardArgs& args);
void norm_backward(const NormBackwardArgs& args);
}  // namespace cpu
namespace cuda {
void norm_forward(const NormForwardArgs& args, Stream stream);
void norm_backward(const NormBackwardArgs& args, Stream stream);
bool norm_takes_moments(const TensorView& x, const TensorView& gamma, const TensorView& beta);
}  // namespace cuda

}  // namespace te
