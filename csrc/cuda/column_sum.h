// How kernels finish their column sums.
#pragma once

#include <cuda_runtime.h>

#include "ops/column_sum.h"

namespace te::cuda {

// For the partial sums that blocks have left in the workspace: runs the second stage, or leaves it
// to the caller of the op. `pitch` is the distance between parts in floats. If `second` is given,
// the parts of its sums follow those of `first`.
void finish_column_sums(const ColumnSumWorkspace& workspace, int64_t parts, int64_t pitch,
                        const TensorView& first, const TensorView& second, cudaStream_t stream);

}  // namespace te::cuda
