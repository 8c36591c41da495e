// sum_parts: what ranks have computed of the same rows, summed in fp32 in this order: this rank's,
// those of the others, the bias. It is rounded once, to the dtype of all.
#pragma once

#include "core/tensor_view.h"

namespace te {

struct SumParts {
  TensorView own;     // [..., cols], fp32/fp16/bf16, contiguous
  const char* first;  // those of other ranks: of the same shape and dtype, in memory of this device
  int64_t stride;     // bytes from one to the next
  int count;          // of them
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
