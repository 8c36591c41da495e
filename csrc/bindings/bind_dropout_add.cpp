// Bindings of dropout_add.
#include "bindings/bindings.h"
#include "bindings/recording.h"
#include "bindings/tensor_bridge.h"
#include "bindings/workspace.h"
#include "ops/dropout_add.h"

namespace te::bindings {
namespace {

void dropout_add_forward_into(const TensorView& x, const TensorView& bias,
                              const TensorView& residual, const TensorView& seed, float p,
                              const TensorView& out) {
  dropout_add_forward(
      {.x = x, .bias = bias, .residual = residual, .seed = seed, .p = p, .out = out},
      bridge::current_stream(x.device));
}

void dropout_add_backward_into(const TensorView& dout, const TensorView& seed, float p,
                               const TensorView& dx, const SumsOutput& dbias) {
  const Stream stream = bridge::current_stream(dout.device);
  dropout_add_backward({.dout = dout,
                        .seed = seed,
                        .p = p,
                        .dx = dx,
                        .dbias = dbias.to,
                        .workspace = column_sum_workspace(dbias, dout, stream)},
                       stream);
}

}  // namespace

void bind_dropout_add(pybind11::module_& m) {
  using pybind11::arg;
  using pybind11::none;
  m.def("dropout_add_forward", recordable<&dropout_add_forward_into>, arg("x"), arg("bias"),
        arg("residual"), arg("seed"), arg("p"), arg("out"));
  m.def("dropout_add_backward", recordable<&dropout_add_backward_into>, arg("dout"), arg("seed"),
        arg("p"), arg("dx") = none(), arg("dbias") = none());
}

}  // namespace te::bindings
