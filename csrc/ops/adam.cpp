#include "ops/adam.h"

#include <utility>

#include "ops/check.h"
#include "ops/dispatch.h"

namespace te {
namespace {

constexpr const char* kOp = "adam";

// Checks the tensors of the first parameter; those of the others must have the same dtypes.
void of_known_dtypes(const AdamTensors& first) {
  const bool halves = first.parameter.dtype == DType::Int16;
  if (!halves) check::dtype(first.parameter, DType::Float32, kOp, "the parameter");
  require(!halves || (first.weight && first.weight.dtype == DType::BFloat16), Kind::Value, kOp,
          "expected bfloat16 weights beside the low bits of parameters, got ",
          first.weight ? name_of(first.weight.dtype) : "none");
  for (const auto& [moment, name] :
       {std::pair{&first.mean, "the mean"}, std::pair{&first.square, "the mean of squares"}})
    if (moment->dtype != DType::BFloat16) check::dtype(*moment, DType::Float32, kOp, name);
}

void of_one_kind(const AdamTensors& t, const AdamTensors& first) {
  check::alike(t.parameter, first.parameter.dtype, t.parameter, kOp, "the parameter");
  check::alike(t.mean, first.mean.dtype, t.parameter, kOp, "the mean");
  check::alike(t.square, first.square.dtype, t.parameter, kOp, "the mean of squares");
  check::values_like(t.gradient, t.parameter, kOp, "the gradient");
  check::same_device(t.parameter, first.parameter, kOp, "the parameter");
  check::dtype(t.gradient, first.gradient.dtype, kOp, "the gradient");
  require(static_cast<bool>(t.weight) == static_cast<bool>(first.weight), Kind::Value, kOp,
          "expected weights beside all parameters or none");
  require(static_cast<bool>(t.amax) == static_cast<bool>(first.amax), Kind::Value, kOp,
          "expected amaxes of all parameters or none");
  require(!(t.amax && t.weight), Kind::Value, kOp,
          "expected weights or amaxes beside parameters, got both");
  if (t.amax) check::vector(t.amax, 1, DType::Float32, t.parameter, kOp, "the amax");
  if (!t.weight) return;
  check::values_like(t.weight, t.parameter, kOp, "the weight");
  check::dtype(t.weight, first.weight.dtype, kOp, "the weight");
}

}  // namespace

void adam(const AdamArgs& args, Stream stream) {
  if (args.tensors.empty()) return;
  const AdamTensors& first = args.tensors.front();
  of_known_dtypes(first);
  for (const AdamTensors& tensors : args.tensors) of_one_kind(tensors, first);
  check::vector(args.step, 1, DType::Float32, first.parameter, kOp, "the step");
  check::vector(args.rate, 1, DType::Float32, first.parameter, kOp, "the rate");
  if (args.factor)
    check::vector(args.factor, 1, DType::Float32, first.parameter, kOp, "the factor");
  if (args.found_inf)
    check::vector(args.found_inf, 1, DType::Float32, first.parameter, kOp, "found_inf");
  on_device<cpu::adam, cuda::adam>(first.parameter, args, stream);
}

}  // namespace te
