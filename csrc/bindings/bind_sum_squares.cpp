// Binding of sum_squares.
#include <pybind11/stl.h>

#include "bindings/bindings.h"
#include "bindings/tensor_bridge.h"
#include "ops/sum_squares.h"

namespace te::bindings {
namespace {

void sum_squares_into(const std::vector<TensorView>& tensors, const TensorView& sums) {
  sum_squares({.tensors = tensors, .sums = sums}, bridge::current_stream(sums.device));
}

}  // namespace

void bind_sum_squares(pybind11::module_& m) {
  using pybind11::arg;
  m.def("sum_squares", &sum_squares_into, arg("tensors"), arg("sums"));
}

}  // namespace te::bindings
