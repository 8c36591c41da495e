// Binding of Adam.
#include <pybind11/stl.h>

#include "bindings/bindings.h"
#include "bindings/tensor_bridge.h"
#include "ops/adam.h"

namespace te::bindings {
namespace {

using Views = std::vector<TensorView>;
using Rules = std::tuple<double, double, double, double, bool>;

void adam_step(const Views& parameters, const Views& means, const Views& squares,
               const Views& gradients, const Views& weights, const Views& amaxes,
               const TensorView& step, const TensorView& rate, const TensorView& factor,
               const TensorView& found_inf, const Rules& rules) {
  const size_t count = parameters.size();
  for (const Views* list : {&means, &squares, &gradients, &weights, &amaxes})
    require(list->size() == count, Kind::Value, "adam", "expected lists of one length");
  AdamArgs args;
  args.step = step;
  args.rate = rate;
  args.factor = factor;
  args.found_inf = found_inf;
  std::tie(args.beta1, args.beta2, args.epsilon, args.decay, args.decoupled) = rules;
  for (size_t i = 0; i < count; ++i)
    args.tensors.push_back(
        {parameters[i], means[i], squares[i], gradients[i], weights[i], amaxes[i]});
  adam(args, bridge::current_stream(step.device));
}

}  // namespace

void bind_adam(pybind11::module_& m) {
  using pybind11::arg;
  m.def("adam", &adam_step, arg("parameters"), arg("means"), arg("squares"), arg("gradients"),
        arg("weights"), arg("amaxes"), arg("step"), arg("rate"), arg("factor"), arg("found_inf"),
        arg("rules"));
}

}  // namespace te::bindings
