// Second stage of the column sums: adds the parts that blocks have left in the workspace.
#pragma once

#include <cuda_runtime.h>

#include "core/tensor_view.h"

namespace te::cuda {

// out[j] = sum over p < parts of partials[p, j], in order, in fp32; rounded to the dtype of out.
// `pitch` is the distance between parts in floats (>= out.numel()).
void reduce_column_parts(const float* partials, int64_t parts, int64_t pitch, const TensorView& out,
                         cudaStream_t stream);

// The same for two vectors of one size and dtype. A part has the sums of the first vector, then
// those of the second.
void reduce_column_parts(const float* partials, int64_t parts, const TensorView& first,
                         const TensorView& second, cudaStream_t stream);

}  // namespace te::cuda
