// Sums of squares of many tensors (for the norm of gradients), in fp32: one sum for each block of
// kSumSquaresBlock elements of a tensor; its last block may have fewer. Equal tensors give equal
// bits.
#pragma once

#include <vector>

#include "core/tensor_view.h"

namespace te {

constexpr int64_t kSumSquaresBlock = 1 << 14;

inline int64_t sum_squares_blocks(const TensorView& x) {
  return (x.numel() + kSumSquaresBlock - 1) / kSumSquaresBlock;
}

struct SumSquaresArgs {
  std::vector<TensorView> tensors;  // on one device, contiguous, fp32/fp16/bf16
  TensorView sums;                  // fp32, one for each block of the first tensor, the second, ...
};

void sum_squares(const SumSquaresArgs& args, Stream stream);

namespace cpu {
void sum_squares(const SumSquaresArgs& args);
}
namespace cuda {
void sum_squares(const SumSquaresArgs& args, Stream stream);
}

}  // namespace te
