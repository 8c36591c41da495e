// Binding of cast.
#include "bindings/bindings.h"
#include "bindings/recording.h"
#include "bindings/tensor_bridge.h"
#include "ops/cast.h"

namespace te::bindings {
namespace {

void cast_into(const TensorView& x, const TensorView& y, const TensorView& factor) {
  cast({.x = x, .y = y, .factor = factor}, bridge::current_stream(x.device));
}

}  // namespace

void bind_cast(pybind11::module_& m) {
  using pybind11::arg;
  m.def("cast", recordable<&cast_into>, arg("x"), arg("y"), arg("factor") = pybind11::none());
}

}  // namespace te::bindings
