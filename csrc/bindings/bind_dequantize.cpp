// Bindings of dequantize and transpose.
#include "bindings/bindings.h"
#include "bindings/quantized_args.h"
#include "bindings/recording.h"
#include "bindings/tensor_bridge.h"
#include "ops/dequantize.h"
#include "ops/transpose.h"

namespace te::bindings {
namespace {

void dequantize_into(const TensorView& codes, int format, const TensorView& scales,
                     const TensorView& x) {
  dequantize({.q = codes,
              .dtype = codec_of(format),
              .blocks = blocks_of(format),
              .scales = scales,
              .x = x},
             bridge::current_stream(codes.device));
}

void transpose_into(const TensorView& x, const TensorView& out, const TensorView& scales,
                    const TensorView& out_scales) {
  transpose({.x = x, .out = out, .scales = scales, .out_scales = out_scales},
            bridge::current_stream(x.device));
}

}  // namespace

void bind_dequantize(pybind11::module_& m) {
  using pybind11::arg;
  using pybind11::none;
  m.def("dequantize", recordable<&dequantize_into>, arg("codes"), arg("format"), arg("scales"),
        arg("x"));
  m.def("transpose", recordable<&transpose_into>, arg("x"), arg("out"), arg("scales") = none(),
        arg("out_scales") = none());
}

}  // namespace te::bindings
