// Exponentials for softmax: of scores, from which the largest score of their row is subtracted.
#pragma once

namespace te::cuda {

__device__ __forceinline__ float minus_infinity() { return __int_as_float(0xff800000); }

// exp(x) for x <= 0; results below 2^-126 are zero.
__device__ __forceinline__ float fast_exp(float x) {
  float result;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(result) : "f"(x * 1.4426950408889634f));
  return result;
}

// What is subtracted from the scores of a row: the largest one, or 0 if all are -Inf. Subtracting
// -Inf from -Inf would give NaN; this way their exponentials are 0.
__device__ __forceinline__ float shift_of(float largest) {
  return largest == minus_infinity() ? 0.0f : largest;
}

}  // namespace te::cuda
