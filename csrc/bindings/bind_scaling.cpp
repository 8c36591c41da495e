// Bindings of the ops that find scales: amax, current_scales_many, delayed_scaling_update,
// gather_amax.
#include <pybind11/stl.h>

#include "bindings/bindings.h"
#include "bindings/recording.h"
#include "bindings/tensor_bridge.h"
#include "bindings/workspace.h"
#include "ops/amax.h"
#include "ops/delayed_scaling.h"

namespace te::bindings {
namespace {

AmaxArgs amax_args(const TensorView& x, const TensorView& result, const TensorView& scales,
                   int format, bool power_of_2, float epsilon, Stream stream, size_t number = 0) {
  return {.x = x,
          .scale = {.dtype = static_cast<DType>(format),
                    .scales = scales,
                    .amax = result,
                    .scratch = amax_scratch(x.device, stream, number),
                    .epsilon = epsilon,
                    .power_of_2 = power_of_2}};
}

void amax_into(const TensorView& x, const TensorView& result, const TensorView& scales, int format,
               bool power_of_2, float epsilon) {
  const Stream stream = bridge::current_stream(x.device);
  const AmaxArgs args = amax_args(x, result, scales, format, power_of_2, epsilon, stream);
  amax({&args, 1}, stream);
}

void current_scales_many(const std::vector<TensorView>& tensors,
                         const std::vector<TensorView>& scales, int format, bool power_of_2,
                         float epsilon) {
  require(!tensors.empty() && scales.size() == tensors.size(), Kind::Value, "current_scales_many",
          "expected tensors and as many scales, got ", tensors.size(), " and ", scales.size());
  const Stream stream = bridge::current_stream(tensors.front().device);
  std::vector<AmaxArgs> all;
  for (const TensorView& x : tensors)
    all.push_back(
        amax_args(x, {}, scales[all.size()], format, power_of_2, epsilon, stream, all.size()));
  amax(all, stream);
}

AmaxAlgorithm algorithm_of(bool most_recent) {
  return most_recent ? AmaxAlgorithm::MostRecent : AmaxAlgorithm::Max;
}

void update_scales(const TensorView& table, const TensorView& reduced, bool most_recent,
                   float fp8_max, int margin, const TensorView& amax, const TensorView& scale) {
  delayed_scaling_update({.table = table,
                          .reduced = reduced,
                          .amax = amax,
                          .scale = scale,
                          .algorithm = algorithm_of(most_recent),
                          .fp8_max = fp8_max,
                          .margin = margin},
                         bridge::current_stream(table.device));
}

void gather_amax_into(const TensorView& table, const TensorView& reduced, bool most_recent,
                      const TensorView& out) {
  gather_amax(
      {.table = table, .reduced = reduced, .algorithm = algorithm_of(most_recent), .out = out},
      bridge::current_stream(table.device));
}

}  // namespace

void bind_scaling(pybind11::module_& m) {
  using pybind11::arg;
  using pybind11::none;
  m.def("amax", recordable<&amax_into>, arg("x"), arg("amax"), arg("scales"), arg("format"),
        arg("power_of_2"), arg("epsilon"));
  m.def("current_scales_many", recordable<&current_scales_many>, arg("tensors"), arg("scales"),
        arg("format"), arg("power_of_2"), arg("epsilon"));
  m.def("delayed_scaling_update", &update_scales, arg("table"), arg("reduced"), arg("most_recent"),
        arg("fp8_max"), arg("margin"), arg("amax") = none(), arg("scale") = none());
  m.def("gather_amax", &gather_amax_into, arg("table"), arg("reduced"), arg("most_recent"),
        arg("out"));
}

}  // namespace te::bindings
