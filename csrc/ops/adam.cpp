#include "ops/adam.h"

#include "ops/check.h"
#include "ops/dispatch.h"

namespace te {
namespace {

constexpr const char* kOp = "adam";

void state(const TensorView& t, const TensorView& like, std::string_view name) {
  check::dtype(t, DType::Float32, kOp, name);
  check::same_shape(t, like, kOp, name);
}

void number(const TensorView& t, const TensorView& like, std::string_view name) {
  check::vector(t, 1, DType::Float32, kOp, name);
  check::same_device(t, like, kOp, name);
}

void of_one_kind(const AdamTensors& t, const AdamTensors& first) {
  state(t.parameter, t.parameter, "the parameter");
  state(t.mean, t.parameter, "the mean");
  state(t.square, t.parameter, "the mean of squares");
  check::high_precision(t.gradient, kOp, "the gradient");
  check::same_shape(t.gradient, t.parameter, kOp, "the gradient");
  check::same_device(t.parameter, first.parameter, kOp, "the parameter");
  check::dtype(t.gradient, first.gradient.dtype, kOp, "the gradient");
  require(static_cast<bool>(t.weight) == static_cast<bool>(first.weight), Kind::Value, kOp,
          "expected weights beside all parameters or none");
  require(static_cast<bool>(t.amax) == static_cast<bool>(first.amax), Kind::Value, kOp,
          "expected amaxes of all parameters or none");
  require(!(t.amax && t.weight), Kind::Value, kOp,
          "expected weights or amaxes beside parameters, got both");
  if (t.amax) number(t.amax, t.parameter, "the amax");
  if (!t.weight) return;
  check::high_precision(t.weight, kOp, "the weight");
  check::same_shape(t.weight, t.parameter, kOp, "the weight");
  check::dtype(t.weight, first.weight.dtype, kOp, "the weight");
}

}  // namespace

void adam(const AdamArgs& args, Stream stream) {
  if (args.tensors.empty()) return;
  const AdamTensors& first = args.tensors.front();
  for (const AdamTensors& tensors : args.tensors) of_one_kind(tensors, first);
  number(args.step, first.parameter, "the step");
  number(args.rate, first.parameter, "the rate");
  if (args.factor) number(args.factor, first.parameter, "the factor");
  on_device(
      first.parameter, [&] { cpu::adam(args); }, [&] { cuda::adam(args, stream); });
}

}  // namespace te
