// The scales of FP8 attention in the form that cuDNN reads, and the amaxes that it writes.
#pragma once

#include <cuda_runtime.h>

#include "ops/attention.h"

namespace te::cuda {

// Where cuDNN writes the amaxes of a call.
inline float* amaxes_of(const AttentionFp8& fp8, bool backward) {
  return fp8.pairs.ptr<float>() + 2 * AttentionFp8::scale_count(backward);
}

// Writes the pairs of the scales, and zeroes the amaxes of the call.
void write_pairs(const AttentionFp8& fp8, bool backward, cudaStream_t stream);

// Raises the amaxes of the arguments, if they are not absent, to those of the call. NaN is ignored.
void raise_amaxes(const AttentionFp8& fp8, bool backward, cudaStream_t stream);

}  // namespace te::cuda
