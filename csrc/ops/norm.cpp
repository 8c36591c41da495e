#include "ops/norm.h"

#include "ops/check.h"
#include "ops/column_sum.h"
#include "ops/dispatch.h"

namespace te {
namespace {

void check_absent(const TensorView& t, std::string_view op, std::string_view name) {
  require(!t, Kind::Value, op, "expected no ", name, " for RMSNorm, got ", t);
}

// Checks the inputs that forward and backward have in common.
void check_input(const TensorView& x, const TensorView& gamma, std::string_view op) {
  check::input(x, op, "x");
  require(x.cols() > 0, Kind::Value, op, "expected at least one column in x, got shape ",
          ShapeOf{x});
  check::high_precision(gamma, op, "gamma");
  check::vector(gamma, x.cols(), gamma.dtype, x, op, "gamma");
}

void check_statistics(NormKind kind, const TensorView& mean, const TensorView& rstd,
                      const TensorView& x, std::string_view op) {
  if (kind == NormKind::LayerNorm)
    check::vector(mean, x.rows(), DType::Float32, x, op, "mean");
  else
    check_absent(mean, op, "mean");
  check::vector(rstd, x.rows(), DType::Float32, x, op, "rstd");
}

void check_outputs(const NormForwardArgs& args, std::string_view op) {
  require(args.y || args.quantized, Kind::Value, op,
          "expected a plain or an FP8 output, got neither");
  if (args.y) check::values_like(args.y, args.x, op, "y");
  if (args.quantized) {
    check::quantized(args.quantized, args.x.rows(), args.x.cols(), args.x, op);
    check::defined(args.quantized.scale, op, "the scale of FP8 outputs");
  }
  check::running_amax(args.quantized, args.x, op);
  if (!args.current) return;
  require(args.y && !args.quantized, Kind::Value, op,
          "expected a plain output alone with a current scale, got ",
          args.y ? "FP8 outputs too" : "none");
  check::current_scale(args.current, args.x, op);
}

}  // namespace

bool norm_takes_moments(const TensorView& x, const TensorView& gamma, const TensorView& beta) {
  return x.device.type == DeviceType::CUDA && cuda::norm_takes_moments(x, gamma, beta);
}

void norm_forward(const NormForwardArgs& args, Stream stream) {
  constexpr const char* kOp = "norm_forward";
  check_input(args.x, args.gamma, kOp);
  if (args.kind == NormKind::LayerNorm)
    check::vector(args.beta, args.x.cols(), args.gamma.dtype, args.x, kOp, "beta");
  else
    check_absent(args.beta, kOp, "beta");
  check_statistics(args.kind, args.mean, args.rstd, args.x, kOp);
  check_outputs(args, kOp);
  check::tile_moments(args.moments, args.x, kOp);
  if (args.moments &&
      !(args.quantized.columnwise && norm_takes_moments(args.x, args.gamma, args.beta)))
    check::defined(args.y, kOp, "y");
  on_device<cpu::norm_forward, cuda::norm_forward>(args.x, args, stream);
}

void norm_backward(const NormBackwardArgs& args, Stream stream) {
  constexpr const char* kOp = "norm_backward";
  const int64_t cols = args.x.cols();
  check_input(args.x, args.gamma, kOp);
  check::values_like(args.dy, args.x, kOp, "dy");
  check_statistics(args.kind, args.mean, args.rstd, args.x, kOp);
  check::alike(args.dx, args.x.dtype, args.x, kOp, "dx");
  if (args.residual_grad)
    check::alike(args.residual_grad, args.x.dtype, args.x, kOp, "residual_grad");
  check::vector(args.dgamma, cols, args.gamma.dtype, args.x, kOp, "dgamma");
  if (args.kind == NormKind::LayerNorm)
    check::vector(args.dbeta, cols, args.gamma.dtype, args.x, kOp, "dbeta");
  else
    check_absent(args.dbeta, kOp, "dbeta");
  check::column_sum_workspace(args.workspace, args.x, args.x.rows(), 2 * cols, kOp);
  on_device<cpu::norm_backward, cuda::norm_backward>(args.x, args, stream);
}

}  // namespace te
