// Warp and block reductions, and the amax that several blocks share.
#pragma once

#include "core/quantized_view.h"
#include "core/scaling.h"

namespace te::cuda {

struct Sum {
  __device__ __forceinline__ float operator()(float a, float b) const { return a + b; }
};
struct Max {
  __device__ __forceinline__ float operator()(float a, float b) const { return fmaxf(a, b); }
};

template <class Op>
__device__ __forceinline__ float warp_reduce(float value, Op op) {
#pragma unroll
  for (int offset = 16; offset > 0; offset /= 2)
    value = op(value, __shfl_xor_sync(0xffffffffu, value, offset));
  return value;
}

// All threads of the block get the result. `shared` holds one float per warp and may be reused
// after the next __syncthreads.
template <class Op>
__device__ __forceinline__ float block_reduce(float value, Op op, float identity, float* shared) {
  const int lane = static_cast<int>(threadIdx.x) % 32, warp = static_cast<int>(threadIdx.x) / 32;
  const int warps = (static_cast<int>(blockDim.x) + 31) / 32;
  value = warp_reduce(value, op);
  if (lane == 0) shared[warp] = value;
  __syncthreads();
  value = lane < warps ? shared[lane] : identity;
  return warp_reduce(value, op);
}

// The maximum over a warp. Non-negative floats have the order of their bits as integers, so it
// takes one instruction instead of five shuffles.
__device__ __forceinline__ float warp_max_nonnegative(float value) {
  return __uint_as_float(__reduce_max_sync(0xffffffffu, __float_as_uint(value)));
}

// Raises a non-negative float to `value`, if it is less.
__device__ __forceinline__ void atomic_max(float* address, float value) {
  if (value > 0.0f) atomicMax(reinterpret_cast<int*>(address), __float_as_int(value));
}

// The amax of a block that has a __syncthreads anyway: every thread calls leave() before it, one
// thread calls total() after it.
template <int kWarps>
struct BlockAmax {
  float part[kWarps];

  __device__ __forceinline__ void leave(float value) {
    value = warp_max_nonnegative(value);
    if (threadIdx.x % 32 == 0) part[threadIdx.x / 32] = value;
  }
  __device__ __forceinline__ float total() const {
    float result = part[0];
#pragma unroll
    for (int warp = 1; warp < kWarps; ++warp) result = fmaxf(result, part[warp]);
    return result;
  }
};

// Device-side form of CurrentScale. One thread per block calls finish() with the amax of its block,
// once the block is done; the last of `blocks` blocks writes the scale and sets the scratch to zero
// again.
struct CurrentScaleSink {
  float* scales = nullptr;
  float* amax = nullptr;
  unsigned* scratch = nullptr;
  float fp8_max = 0.0f;
  float epsilon = 0.0f;
  bool power_of_2 = false;

  __device__ __forceinline__ explicit operator bool() const { return scratch; }

  __device__ __forceinline__ void finish(float block_amax, unsigned blocks) const {
    atomicMax(&scratch[0], __float_as_uint(block_amax));
    __threadfence();
    if (atomicAdd(&scratch[1], 1u) != blocks - 1) return;
    __threadfence();
    const float value = __uint_as_float(atomicExch(&scratch[0], 0u));
    scratch[1] = 0;
    if (amax) *amax = value;
    if (scales) write_scales(value);
  }

  __device__ __forceinline__ void write_scales(float value) const {
    const float scale = current_scale(value, fp8_max, epsilon, power_of_2);
    scales[0] = divide(1.0f, scale);
    scales[1] = scale;
  }
};

inline CurrentScaleSink sink_of(const CurrentScale& s) {
  return {s.scales.ptr<float>(), s.amax.ptr<float>(), s.scratch.ptr<unsigned>(),
          max_of(s.dtype),       s.epsilon,           s.power_of_2};
}

}  // namespace te::cuda
