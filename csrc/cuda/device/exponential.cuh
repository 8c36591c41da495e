// Exponentials of differences to a row's largest value.
#pragma once

namespace te::cuda {

__device__ __forceinline__ float minus_infinity() { return __int_as_float(0xff800000); }

// exp(x) for x <= 0; results below 2^-126 are zero.
__device__ __forceinline__ float fast_exp(float x) {
  float result;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(result) : "f"(x * 1.4426950408889634f));
  return result;
}

// Where all values are -Inf, exp(-Inf - 0) gives the zeros that exp(-Inf + Inf) would not.
__device__ __forceinline__ float shift_of(float largest) {
  return largest == minus_infinity() ? 0.0f : largest;
}

}  // namespace te::cuda
