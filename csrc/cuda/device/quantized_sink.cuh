// Device-side form of QuantizedView: what a kernel that produces FP8 needs of it.
#pragma once

#include "core/quantized_view.h"
#include "core/scaling.h"

namespace te::cuda {

struct QuantizedSink {
  uint8_t* rowwise = nullptr;
  uint8_t* columnwise = nullptr;
  float* scales = nullptr;
  const float* scale = nullptr;
  float* amax = nullptr;

  __device__ __forceinline__ explicit operator bool() const { return scales; }

  // Returns the scale to multiply by. With delayed scaling one thread of the grid, the `writer`,
  // also stores the pair {1 / scale, scale} for the consumers of the codes.
  __device__ __forceinline__ float scale_used(bool writer) const {
    if (!scale) return scales[1];
    const float value = *scale;
    if (writer) {
      scales[0] = divide(1.0f, value);
      scales[1] = value;
    }
    return value;
  }
};

inline QuantizedSink sink_of(const QuantizedView& q) {
  return {q.rowwise.ptr<uint8_t>(), q.columnwise.ptr<uint8_t>(), q.scales.ptr<float>(),
          q.scale.ptr<float>(), q.amax.ptr<float>()};
}

}  // namespace te::cuda
