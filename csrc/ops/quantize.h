// quantize: FP8 codes of a tensor, row-wise, transposed or both, in one pass over it.
//   q = saturate(round_to_nearest_even(x * scale)), amax = max(amax, max |x|),
//   dbias[j] = sum over rows of x[:, j] in fp32, rounded once to the dtype of dbias.
#pragma once

#include <vector>

#include "core/quantized_view.h"
#include "ops/column_sum.h"
#include "ops/moments.h"

namespace te {

struct QuantizeArgs {
  TensorView x;  // [..., cols], fp32/fp16/bf16, contiguous; rows = product of the leading sizes
  QuantizedView out;
  TensorView dbias;              // [cols], fp32/fp16/bf16; may be absent
  ColumnSumWorkspace workspace;  // only where dbias is given
  MomentsSink moments;           // of x; may be absent
};

void quantize(const QuantizeArgs& args, Stream stream);
// Quantises several tensors in few launches (for instance small weights, whose launches would take
// longer than their casts). All have the same device, dtype and FP8 format, and neither dbias nor
// moments.
void quantize_many(const std::vector<QuantizeArgs>& all, Stream stream);

namespace cpu {
void quantize(const QuantizeArgs& args);
}
namespace cuda {
void quantize(const QuantizeArgs& args, Stream stream);
void quantize_many(const std::vector<QuantizeArgs>& all, Stream stream);
}  // namespace cuda

}  // namespace te
