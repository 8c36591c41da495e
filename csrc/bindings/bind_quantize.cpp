// Bindings of quantize; the FP8 format travels as the integer value of DType.
#include "bindings/bindings.h"
#include "bindings/program.h"
#include "bindings/quantized_args.h"
#include "bindings/workspace.h"
#include "ops/quantize.h"

namespace te::bindings {
namespace {

void quantize_into(const TensorView& x, const TensorView& rowwise, const TensorView& columnwise,
                   const TensorView& scales, const TensorView& scale, const TensorView& amax,
                   int format, const TensorView& dbias) {
  const Stream stream = bridge::current_stream(x.device);
  QuantizeArgs args{
      .x = x,
      .out = quantized_view(rowwise, columnwise, scales, scale, amax, static_cast<DType>(format)),
      .dbias = dbias,
      .workspace = {}};
  if (dbias) args.workspace = column_sum_workspace(x.device, stream, x.rows(), x.cols());
  quantize(args, stream);
}

}  // namespace

void bind_quantize(pybind11::module_& m) {
  using pybind11::arg;
  using pybind11::none;
  m.def("quantize", recorded<&quantize_into>, arg("x"), arg("rowwise"), arg("columnwise"),
        arg("scales"), arg("scale") = none(), arg("amax") = none(), arg("format"),
        arg("dbias") = none());
}

}  // namespace te::bindings
