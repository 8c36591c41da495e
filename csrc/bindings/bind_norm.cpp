// Bindings of the norms. `current` asks for current scaling, `rowwise` or `columnwise` for delayed
// scaling; `scales`, `amax` and `format` belong to the one that was asked for.
#include "bindings/bindings.h"
#include "bindings/quantized_args.h"
#include "bindings/recording.h"
#include "bindings/workspace.h"
#include "ops/norm.h"

namespace te::bindings {
namespace {

void norm_forward_into(const TensorView& x, const TensorView& gamma, const TensorView& beta,
                       int kind, float epsilon, bool zero_centered, const TensorView& y,
                       const TensorView& rowwise, const TensorView& columnwise,
                       const TensorView& scales, const TensorView& mean, const TensorView& rstd,
                       int format, const TensorView& scale, const TensorView& amax, bool current,
                       float amax_epsilon, bool power_of_2, const TensorView& moments,
                       const TensorView& active) {
  const Stream stream = bridge::current_stream(x.device);
  const auto fp8 = static_cast<DType>(format);
  NormForwardArgs args{.kind = static_cast<NormKind>(kind),
                       .x = x,
                       .gamma = gamma,
                       .beta = beta,
                       .epsilon = epsilon,
                       .zero_centered = zero_centered,
                       .y = y,
                       .quantized = {},
                       .current = {},
                       .mean = mean,
                       .rstd = rstd,
                       .moments = moments_sink(moments, active, x, stream)};
  if (rowwise || columnwise)
    args.quantized = quantized_view(rowwise, columnwise, scales, scale, amax, fp8);
  if (current)
    args.current = {fp8, scales, amax, amax_scratch(x.device, stream), amax_epsilon, power_of_2};
  norm_forward(args, stream);
}

void norm_backward_into(const TensorView& dy, const TensorView& x, const TensorView& gamma,
                        const TensorView& mean, const TensorView& rstd, int kind,
                        bool zero_centered, const TensorView& residual_grad, const TensorView& dx,
                        const SumsOutput& dgamma, const SumsOutput& dbeta) {
  const Stream stream = bridge::current_stream(x.device);
  norm_backward({.kind = static_cast<NormKind>(kind),
                 .dy = dy,
                 .x = x,
                 .gamma = gamma,
                 .mean = mean,
                 .rstd = rstd,
                 .zero_centered = zero_centered,
                 .residual_grad = residual_grad,
                 .dx = dx,
                 .dgamma = dgamma.to,
                 .dbeta = dbeta.to,
                 .workspace = column_sum_workspace(dgamma, x, stream, 2)},
                stream);
}

}  // namespace

void bind_norm(pybind11::module_& m) {
  using pybind11::arg;
  using pybind11::none;
  m.def("norm_forward", recordable<&norm_forward_into>, arg("x"), arg("gamma"), arg("beta"),
        arg("kind"), arg("epsilon"), arg("zero_centered"), arg("y"), arg("rowwise"),
        arg("columnwise"), arg("scales"), arg("mean"), arg("rstd"), arg("format"), arg("scale"),
        arg("amax"), arg("current"), arg("amax_epsilon"), arg("power_of_2"),
        arg("moments") = none(), arg("active") = none());
  m.def("norm_takes_moments", &norm_takes_moments, arg("x"), arg("gamma"), arg("beta"));
  m.def("norm_backward", recordable<&norm_backward_into>, arg("dy"), arg("x"), arg("gamma"),
        arg("mean"), arg("rstd"), arg("kind"), arg("zero_centered"), arg("residual_grad"),
        arg("dx"), arg("dgamma"), arg("dbeta"));
}

}  // namespace te::bindings
