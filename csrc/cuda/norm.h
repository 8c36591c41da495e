// The kernels behind norm_forward and norm_backward; norm.cpp chooses among them. Each returns
// whether it takes the problem; those that end in _any take all problems.
#pragma once

#include <cuda_runtime.h>

#include "ops/norm.h"

namespace te::cuda {

// One result, plain or row-wise FP8; x read once, a row in the registers of a warp or a block.
bool norm_forward_rows(const NormForwardArgs& args, cudaStream_t stream);
// FP8 results of every kind: x read once, a tile of rows in the shared memory of a cluster.
bool norm_forward_tiles(const NormForwardArgs& args, cudaStream_t stream);
bool norm_tiles_take_moments(const TensorView& x);  // whether it does, if asked for
// Every size, alignment and set of dtypes.
void norm_forward_any(const NormForwardArgs& args, cudaStream_t stream);

// Rows in the registers of a warp or a part of one.
bool norm_backward_narrow(const NormBackwardArgs& args, cudaStream_t stream);
// Rows in the shared memory of a block or a cluster.
bool norm_backward_rows(const NormBackwardArgs& args, cudaStream_t stream);
void norm_backward_any(const NormBackwardArgs& args, cudaStream_t stream);

}  // namespace te::cuda
