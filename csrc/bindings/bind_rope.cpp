// Binding of rope.
#include "bindings/bindings.h"
#include "bindings/recording.h"
#include "bindings/tensor_bridge.h"
#include "ops/rope.h"

namespace te::bindings {
namespace {

void rope_into(const TensorView& x, const TensorView& freqs, const TensorView& starts,
               const TensorView& cu_seqlens, bool batch_first, bool interleaved, bool backward,
               int64_t period, int64_t rotated, const TensorView& out) {
  rope({.x = x,
        .freqs = freqs,
        .starts = starts,
        .cu_seqlens = cu_seqlens,
        .batch_first = batch_first,
        .interleaved = interleaved,
        .backward = backward,
        .period = period,
        .rotated = rotated,
        .out = out},
       bridge::current_stream(x.device));
}

}  // namespace

void bind_rope(pybind11::module_& m) {
  using pybind11::arg;
  m.def("rope", recordable<&rope_into>, arg("x"), arg("freqs"), arg("starts"), arg("cu_seqlens"),
        arg("batch_first"), arg("interleaved"), arg("backward"), arg("period"), arg("rotated"),
        arg("out"));
}

}  // namespace te::bindings
