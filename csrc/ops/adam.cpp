#include "ops/adam.h"

#include <map>

#include "ops/check.h"
#include "ops/dispatch.h"

namespace te {
namespace {

constexpr const char* kOp = "adam";

void moment(const TensorView& t, const TensorView& like, std::string_view name) {
  check::alike(t, t.dtype == DType::BFloat16 ? DType::BFloat16 : DType::Float32, like, kOp, name);
}

void complete(const AdamTensors& t) {
  const bool halves = t.parameter.dtype == DType::Int16;
  check::alike(t.parameter, halves ? DType::Int16 : DType::Float32, t.parameter, kOp,
               "the parameter");
  moment(t.mean, t.parameter, "the mean");
  moment(t.square, t.parameter, "the mean of squares");
  check::values_like(t.gradient, t.parameter, kOp, "the gradient");
  require(!(t.amax && t.weight), Kind::Value, kOp,
          "expected weights or amaxes beside parameters, got both");
  require(!halves || (t.weight && t.weight.dtype == DType::BFloat16), Kind::Value, kOp,
          "expected bfloat16 weights beside the low bits of parameters, got ",
          t.weight ? name_of(t.weight.dtype) : "none");
  if (t.amax) check::vector(t.amax, 1, DType::Float32, t.parameter, kOp, "the amax");
  if (t.weight) check::values_like(t.weight, t.parameter, kOp, "the weight");
}

// What decides which kernel updates a parameter.
struct Dtypes {
  DType parameter, mean, square, gradient, weight;
  bool has_weight, has_amax;

  explicit Dtypes(const AdamTensors& t)
      : parameter(t.parameter.dtype),
        mean(t.mean.dtype),
        square(t.square.dtype),
        gradient(t.gradient.dtype),
        weight(t.weight.dtype),
        has_weight(t.weight),
        has_amax(t.amax) {}
  auto operator<=>(const Dtypes&) const = default;
};

}  // namespace

void adam(const AdamArgs& args, Stream stream) {
  if (args.tensors.empty()) return;
  const TensorView& first = args.tensors.front().parameter;
  check::vector(args.step, 1, DType::Float32, first, kOp, "the step");
  check::vector(args.rate, 1, DType::Float32, first, kOp, "the rate");
  if (args.factor) check::vector(args.factor, 1, DType::Float32, first, kOp, "the factor");
  if (args.found_inf) check::vector(args.found_inf, 1, DType::Float32, first, kOp, "found_inf");
  std::map<Dtypes, AdamArgs> by_dtypes;
  for (const AdamTensors& tensors : args.tensors) {
    complete(tensors);
    check::same_device(tensors.parameter, first, kOp, "the parameter");
    auto [found, is_new] = by_dtypes.try_emplace(Dtypes(tensors), args);
    if (is_new) found->second.tensors.clear();
    found->second.tensors.push_back(tensors);
  }
  for (const auto& [dtypes, alike] : by_dtypes)
    on_device<cpu::adam, cuda::adam>(first, alike, stream);
}

}  // namespace te
