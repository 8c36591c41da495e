// One step of Adam or AdamW for many tensors: each value is read and written once, and
// computed in fp32.
//   g = factor * gradient;  with `decoupled` p *= 1 - rate * decay, else g += decay * p
//   mean += (1 - beta1) * (g - mean);  square += (1 - beta2) * (g * g - square)
//   p -= rate / (1 - beta1^step) * mean / (sqrt(square / (1 - beta2^step)) + epsilon)
//   weight = p, rounded to the dtype of weight (for 16-bit weights with fp32 master parameters)
//   amax = max(amax, max |p|), NaN ignored, for the next cast of p to FP8
// Beside a bf16 weight, a parameter may be stored as the bits that the weight lacks; see
// `ParameterHalves`. Moments may be stored in bf16, to which they are rounded after the step.
// If `found_inf` is not 0, the step is skipped: gradients are not read, and only amax is updated.
// Step, rate, factor and found_inf are read on the device, so a replayed CUDA graph uses the values
// that they have then.
#pragma once

#include <cstdint>
#include <vector>

#include "core/float16.h"
#include "core/tensor_view.h"

namespace te {

struct AdamTensors {
  TensorView parameter;  // fp32, or int16: its low bits; all are contiguous and of one shape
  TensorView mean;       // fp32/bf16
  TensorView square;     // fp32/bf16
  TensorView gradient;   // fp32/fp16/bf16
  TensorView weight;     // fp16/bf16; may be absent. It is bf16 beside low bits of a parameter
  TensorView amax;       // fp32, one value; may be absent, and must be if there is a weight
};

struct AdamArgs {
  std::vector<AdamTensors> tensors;  // on one device
  TensorView step;                   // fp32, one value: the number of this step, from 1
  TensorView rate;                   // fp32, one value
  TensorView factor;                 // fp32, one value; absent: 1
  TensorView found_inf;              // fp32, one value; absent: 0
  double beta1 = 0.9;
  double beta2 = 0.999;
  double epsilon = 1e-8;
  double decay = 0.0;
  bool decoupled = true;
};

void adam(const AdamArgs& args, Stream stream);

// Calls f(Tag of the parameter, Tag of the mean, Tag of the square): float, int16_t or BFloat16.
template <class F>
void dispatch_states(const AdamTensors& like, F&& f) {
  const auto of_moment = [](DType dtype, auto&& next) {
    if (dtype == DType::BFloat16) return next(Tag<BFloat16>{});
    next(Tag<float>{});
  };
  of_moment(like.mean.dtype, [&](auto mean) {
    of_moment(like.square.dtype, [&](auto square) {
      if (like.parameter.dtype == DType::Int16) return f(Tag<int16_t>{}, mean, square);
      f(Tag<float>{}, mean, square);
    });
  });
}

// The backends get tensors of equal dtypes.
namespace cpu {
void adam(const AdamArgs& args);
}
namespace cuda {
void adam(const AdamArgs& args, Stream stream);
}

}  // namespace te
