// Bindings of cross entropy.
#include "bindings/bindings.h"
#include "bindings/quantized_args.h"
#include "bindings/recording.h"
#include "bindings/tensor_bridge.h"
#include "ops/cross_entropy.h"

namespace te::bindings {
namespace {

void cross_entropy_forward_into(const TensorView& logits, const TensorView& labels,
                                const TensorView& sums) {
  cross_entropy_forward({.logits = logits, .labels = labels, .sums = sums},
                        bridge::current_stream(logits.device));
}

void cross_entropy_backward_into(const TensorView& logits, const TensorView& labels,
                                 const TensorView& log_sums, const TensorView& factors,
                                 float smoothing, float evenly, const TensorView& dx,
                                 const TensorView& rowwise, const TensorView& columnwise,
                                 const TensorView& scales, int format) {
  cross_entropy_backward(
      {.logits = logits,
       .labels = labels,
       .log_sums = log_sums,
       .factors = factors,
       .smoothing = smoothing,
       .evenly = evenly,
       .dx = dx,
       .codes = quantized_view(rowwise, columnwise, scales, {}, {}, static_cast<DType>(format))},
      bridge::current_stream(logits.device));
}

}  // namespace

void bind_cross_entropy(pybind11::module_& m) {
  using pybind11::arg;
  using pybind11::none;
  m.def("cross_entropy_forward", recordable<&cross_entropy_forward_into>, arg("logits"),
        arg("labels"), arg("sums"));
  m.def("cross_entropy_backward", recordable<&cross_entropy_backward_into>, arg("logits"),
        arg("labels"), arg("log_sums"), arg("factors"), arg("smoothing"), arg("evenly"), arg("dx"),
        arg("rowwise") = none(), arg("columnwise") = none(), arg("scales") = none(),
        arg("format") = static_cast<int>(DType::Float8E5M2));
}

}  // namespace te::bindings
