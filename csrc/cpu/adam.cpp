// The CPU backend of Adam, which defines its results: see ops/adam.h. Threads share the elements of
// each tensor.
#include "ops/adam.h"

#include <cmath>

#include "core/adam.h"
#include "core/parallel.h"
#include "cpu/parallel_max.h"

namespace te::cpu {
namespace {

constexpr int64_t kElementsPerThread = 1 << 14;

template <class G>
void step_tensor(const AdamTensors& t, const AdamStep& step) {
  float *parameter = t.parameter.ptr<float>(), *mean = t.mean.ptr<float>(),
        *square = t.square.ptr<float>();
  const G* gradient = t.gradient.ptr<G>();
  parallel_for(t.parameter.numel(), kElementsPerThread, [&](int64_t first, int64_t last) {
    for (int64_t i = first; i < last; ++i) {
      const AdamValue now =
          stepped(step, {parameter[i], mean[i], square[i]}, static_cast<float>(gradient[i]));
      parameter[i] = now.parameter;
      mean[i] = now.mean;
      square[i] = now.square;
    }
  });
}

void round_tensor(const AdamTensors& t) {
  const float* parameter = t.parameter.ptr<float>();
  dispatch_high_precision(t.weight.dtype, "adam", [&](auto tag) {
    using W = typename decltype(tag)::type;
    W* weight = t.weight.ptr<W>();
    for (int64_t i = 0; i < t.parameter.numel(); ++i) weight[i] = W(parameter[i]);
  });
}

void raise_amax(const AdamTensors& t) {
  const float* parameter = t.parameter.ptr<float>();
  float* stored = t.amax.ptr<float>();
  const auto largest = [&](int64_t first, int64_t last) {
    float part = 0.0f;
    for (int64_t i = first; i < last; ++i) part = max_ignoring_nan(part, std::fabs(parameter[i]));
    return part;
  };
  const float amax = parallel_max(t.parameter.numel(), kElementsPerThread, largest);
  *stored = max_ignoring_nan(*stored, amax);
}

}  // namespace

void adam(const AdamArgs& args) {
  const AdamRules rules =
      adam_rules(args.beta1, args.beta2, args.epsilon, args.decay, args.decoupled);
  const AdamStep step = rules.at(*args.step.ptr<float>(), *args.rate.ptr<float>(),
                                 args.factor ? *args.factor.ptr<float>() : 1.0f);
  const bool skips = args.found_inf && *args.found_inf.ptr<float>() != 0.0f;
  for (const AdamTensors& tensors : args.tensors) {
    if (!skips) {
      dispatch_high_precision(tensors.gradient.dtype, "adam", [&](auto tag) {
        step_tensor<typename decltype(tag)::type>(tensors, step);
      });
      if (tensors.weight) round_tensor(tensors);
    }
    if (tensors.amax) raise_amax(tensors);
  }
}

}  // namespace te::cpu
