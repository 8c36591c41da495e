// The CPU backend of Adam, which defines its results: see ops/adam.h. Threads share the elements of
// each tensor.
#include "ops/adam.h"

#include <cmath>
#include <type_traits>

#include "core/adam.h"
#include "core/parallel.h"
#include "cpu/parallel_max.h"

namespace te::cpu {
namespace {

constexpr int64_t kElementsPerThread = 1 << 14;

struct WholeParameters {
  float* parameter;
  explicit WholeParameters(const AdamTensors& t) : parameter(t.parameter.ptr<float>()) {}
  float read(int64_t i) const { return parameter[i]; }
  void write(int64_t i, float value) const { parameter[i] = value; }
};

struct HalvedParameters {
  BFloat16* weight;
  int16_t* low;
  explicit HalvedParameters(const AdamTensors& t)
      : weight(t.weight.ptr<BFloat16>()), low(t.parameter.ptr<int16_t>()) {}
  float read(int64_t i) const { return ParameterHalves{weight[i], low[i]}.parameter(); }
  void write(int64_t i, float value) const {
    const ParameterHalves halves = ParameterHalves::of(value);
    weight[i] = halves.weight;
    low[i] = halves.low;
  }
};

// P: float, or int16_t for low bits. M and S: what the means and squares are stored as.
template <class G, class P, class M, class S>
void step_tensor(const AdamTensors& t, const AdamStep& step) {
  using Parameters =
      std::conditional_t<std::is_same_v<P, float>, WholeParameters, HalvedParameters>;
  const Parameters parameters(t);
  M* mean = t.mean.ptr<M>();
  S* square = t.square.ptr<S>();
  const G* gradient = t.gradient.ptr<G>();
  parallel_for(t.parameter.numel(), kElementsPerThread, [&](int64_t first, int64_t last) {
    for (int64_t i = first; i < last; ++i) {
      const AdamValue before{parameters.read(i), static_cast<float>(mean[i]),
                             static_cast<float>(square[i])};
      const AdamValue now = stepped(step, before, static_cast<float>(gradient[i]));
      parameters.write(i, now.parameter);
      mean[i] = M(now.mean);
      square[i] = S(now.square);
    }
  });
}

// Rounds whole parameters to weights.
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
      dispatch_high_precision(tensors.gradient.dtype, "adam", [&](auto gradient) {
        dispatch_states(tensors, [&](auto parameter, auto mean, auto square) {
          step_tensor<typename decltype(gradient)::type, typename decltype(parameter)::type,
                      typename decltype(mean)::type, typename decltype(square)::type>(tensors,
                                                                                      step);
        });
      });
      if (tensors.weight && tensors.parameter.dtype == DType::Float32) round_tensor(tensors);
    }
    if (tensors.amax) raise_amax(tensors);
  }
}

}  // namespace te::cpu
