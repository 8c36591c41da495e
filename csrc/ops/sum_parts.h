// sum_parts: the sum of the tensors of all ranks (as in an all-reduce), and of a bias. Summands are
// added in fp32 in this order: this rank's tensor, those of the other ranks, the bias. The sum is
// rounded once, to the dtype of the tensors.
#pragma once

#include "core/tensor_view.h"

namespace te {

struct SumParts {
  TensorView own;     // [..., cols], fp32/fp16/bf16, contiguous
  const char* first;  // the tensors of other ranks in memory of this device; shape and dtype of own
  int64_t stride;     // bytes from one of these to the next
  int count;          // their number
  TensorView bias;    // [cols], the same dtype; may be absent
  TensorView out;     // like own
};

namespace cpu {
void sum_parts(const SumParts& sum);
}
namespace cuda {
void sum_parts(const SumParts& sum, Stream stream);
}

}  // namespace te
