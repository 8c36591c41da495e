// Bindings of softmax.
#include "bindings/bindings.h"
#include "bindings/recording.h"
#include "bindings/tensor_bridge.h"
#include "ops/softmax.h"

namespace te::bindings {
namespace {

void softmax_forward_into(const TensorView& x, const TensorView& mask, float scale, int64_t left,
                          int64_t right, int64_t diagonal, const TensorView& y) {
  softmax_forward({.x = x,
                   .mask = mask,
                   .scale = scale,
                   .window = {.left = left, .right = right, .diagonal = diagonal},
                   .y = y},
                  bridge::current_stream(x.device));
}

void softmax_backward_into(const TensorView& dy, const TensorView& y, float scale,
                           const TensorView& dx) {
  softmax_backward({.dy = dy, .y = y, .scale = scale, .dx = dx}, bridge::current_stream(dy.device));
}

}  // namespace

void bind_softmax(pybind11::module_& m) {
  using pybind11::arg;
  m.def("softmax_forward", recordable<&softmax_forward_into>, arg("x"), arg("mask"), arg("scale"),
        arg("left"), arg("right"), arg("diagonal"), arg("y"));
  m.def("softmax_backward", recordable<&softmax_backward_into>, arg("dy"), arg("y"), arg("scale"),
        arg("dx"));
}

}  // namespace te::bindings
