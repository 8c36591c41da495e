// Bindings of the activations. `current_scales` asks for current scaling, `rowwise` or `columnwise`
// for delayed scaling; `format` and `amax` belong to the one that was asked for.
#include "bindings/bindings.h"
#include "bindings/quantized_args.h"
#include "bindings/recording.h"
#include "bindings/workspace.h"
#include "ops/activation.h"

namespace te::bindings {
namespace {

struct Fp8Args {
  QuantizedView quantized;
  CurrentScale current;
};

Fp8Args fp8_args(const QuantizedView& quantized, const TensorView& current_scales, bool power_of_2,
                 float epsilon, Stream stream) {
  Fp8Args args{quantized, {}};
  if (!current_scales) return args;
  args.current = {quantized.dtype, current_scales,
                  quantized.amax,  amax_scratch(current_scales.device, stream),
                  epsilon,         power_of_2};
  args.quantized.amax = {};
  return args;
}

void activation_forward_into(const TensorView& x, int kind, const TensorView& y, int format,
                             const TensorView& rowwise, const TensorView& columnwise,
                             const TensorView& scales, const TensorView& scale,
                             const TensorView& amax, const TensorView& current_scales,
                             bool power_of_2, float epsilon, const TensorView& moments,
                             const TensorView& active, float limit, float alpha, float offset) {
  const Stream stream = bridge::current_stream(x.device);
  const auto [quantized, current] =
      fp8_args(quantized_view(rowwise, columnwise, scales, scale, amax, static_cast<DType>(format)),
               current_scales, power_of_2, epsilon, stream);
  const auto sink = moments_sink(moments, active, x, stream);
  activation_forward(
      {static_cast<ActivationKind>(kind), {limit, alpha, offset}, x, y, quantized, current, sink},
      stream);
}

void activation_backward_into(const TensorView& dy, const TensorView& x, int kind,
                              const TensorView& dx, int format, const TensorView& rowwise,
                              const TensorView& columnwise, const TensorView& scales,
                              const TensorView& scale, const TensorView& amax,
                              const TensorView& current_scales, bool power_of_2, float epsilon,
                              const SumsOutput& dbias, const TensorView& moments,
                              const TensorView& active, float limit, float alpha, float offset,
                              const TensorView& again, const TensorView& again_scales,
                              int again_format, bool again_rounded) {
  const Stream stream = bridge::current_stream(x.device);
  const auto [quantized, current] =
      fp8_args(quantized_view(rowwise, columnwise, scales, scale, amax, static_cast<DType>(format)),
               current_scales, power_of_2, epsilon, stream);
  ActivationBackwardArgs args{.kind = static_cast<ActivationKind>(kind),
                              .parameters = {limit, alpha, offset},
                              .dy = dy,
                              .x = x,
                              .dx = dx,
                              .quantized = quantized,
                              .current = current,
                              .dbias = dbias.to,
                              .workspace = column_sum_workspace(dbias, x, stream),
                              .moments = {},
                              .again = {}};
  args.moments = moments_sink(moments, active, x, stream);
  if (again_scales)
    args.again.quantized =
        quantized_view({}, again, again_scales, {}, {}, static_cast<DType>(again_format));
  else
    args.again.y = again;
  args.again.rounded = again_rounded;
  activation_backward(args, stream);
}

}  // namespace

void bind_activation(pybind11::module_& m) {
  using pybind11::arg;
  using pybind11::none;
  constexpr ActivationParameters kGptOss;
  m.def("activation_forward", recordable<&activation_forward_into>, arg("x"), arg("kind"), arg("y"),
        arg("format"), arg("rowwise"), arg("columnwise"), arg("scales"), arg("scale"), arg("amax"),
        arg("current_scales"), arg("power_of_2"), arg("epsilon"), arg("moments") = none(),
        arg("active") = none(), arg("limit") = kGptOss.limit, arg("alpha") = kGptOss.alpha,
        arg("offset") = kGptOss.offset);
  m.def("activation_backward", recordable<&activation_backward_into>, arg("dy"), arg("x"),
        arg("kind"), arg("dx"), arg("format"), arg("rowwise"), arg("columnwise"), arg("scales"),
        arg("scale"), arg("amax"), arg("current_scales"), arg("power_of_2"), arg("epsilon"),
        arg("dbias"), arg("moments") = none(), arg("active") = none(), arg("limit") = kGptOss.limit,
        arg("alpha") = kGptOss.alpha, arg("offset") = kGptOss.offset, arg("again") = none(),
        arg("again_scales") = none(), arg("again_format") = static_cast<int>(DType::Float8E4M3),
        arg("again_rounded") = false);
  m.def("activation_takes_moments", &activation_takes_moments, arg("x"), arg("dy") = none());
}

}  // namespace te::bindings
