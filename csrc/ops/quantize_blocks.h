// quantize_blocks: FP8 codes with a scale for each block of 128 or 128 x 128 values, row-wise,
// transposed or both, in one pass over the tensor.
//   amax  = max |x| over the block, NaN ignored
//   scale = fp8_max / max(amax, epsilon), or with `power_of_2` the power of two below; 1 if the
//           denominator is 0, Inf or NaN; if the quotient overflows, the largest finite value of
//           the dtype of x
//   q     = saturate(round_to_nearest_even(x * scale))
//   dbias[j] = sum over rows of x[:, j] in fp32, rounded once to the dtype of dbias.
// The blocks of a result lie along the rows of that result: 1 x 128 blocks of the transposed result
// are 128 x 1 blocks of x, with other scales than the row-wise result. 128 x 128 blocks have the
// same scales in both.
#pragma once

#include "core/scale_blocks.h"
#include "core/tensor_view.h"
#include "ops/column_sum.h"

namespace te {

struct BlockCodes {
  TensorView codes;   // one byte each
  TensorView scales;  // fp32, the inverse scales: see core/scale_blocks.h

  explicit operator bool() const { return static_cast<bool>(codes); }
};

struct QuantizeBlocksArgs {
  TensorView x;  // [..., cols], fp32/fp16/bf16, contiguous; rows = product of the leading sizes
  DType dtype = DType::Float8E4M3;
  ScaleBlocks blocks = ScaleBlocks::Rows;
  bool power_of_2 = true;
  float epsilon = 0.0f;
  BlockCodes rowwise;            // [rows, cols]; may be absent
  BlockCodes columnwise;         // [cols, rows]; may be absent
  TensorView dbias;              // [cols], fp32/fp16/bf16; may be absent
  ColumnSumWorkspace workspace;  // only where dbias is given
};

void quantize_blocks(const QuantizeBlocksArgs& args, Stream stream);

namespace cpu {
void quantize_blocks(const QuantizeBlocksArgs& args);
}
namespace cuda {
void quantize_blocks(const QuantizeBlocksArgs& args, Stream stream);
}

}  // namespace te
