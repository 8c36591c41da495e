#include "ops/norm.h"

#include "ops/check.h"
#include "ops/column_sum.h"
#include "ops/dispatch.h"

namespace te {
namespace {

void check_vector(const TensorView& t, const TensorView& x, int64_t count, DType dtype,
                  std::string_view op, std::string_view name) {
  check::vector(t, count, dtype, op, name);
  check::same_device(t, x, op, name);
}

void check_absent(const TensorView& t, std::string_view op, std::string_view name) {
  require(!t, Kind::Value, op, "expected no ", name, " for RMSNorm, got ", t);
}

void check_like_x(const TensorView& t, const TensorView& x, std::string_view op,
                  std::string_view name) {
  check::same_shape(t, x, op, name);
  check::dtype(t, x.dtype, op, name);
}

// What forward and backward read alike.
void check_input(const TensorView& x, const TensorView& gamma, std::string_view op) {
  check::high_precision(x, op, "x");
  check::contiguous(x, op, "x");
  require(x.cols() > 0, Kind::Value, op, "expected at least one column in x, got shape ",
          ShapeOf{x});
  check::high_precision(gamma, op, "gamma");
  check_vector(gamma, x, x.cols(), gamma.dtype, op, "gamma");
}

void check_statistics(NormKind kind, const TensorView& mean, const TensorView& rstd,
                      const TensorView& x, std::string_view op) {
  if (kind == NormKind::LayerNorm)
    check_vector(mean, x, x.rows(), DType::Float32, op, "mean");
  else
    check_absent(mean, op, "mean");
  check_vector(rstd, x, x.rows(), DType::Float32, op, "rstd");
}

void check_outputs(const NormForwardArgs& args, std::string_view op) {
  require(args.y || args.quantized, Kind::Value, op,
          "expected a plain or an FP8 output, got neither");
  if (args.y) {
    check::high_precision(args.y, op, "y");
    check::same_shape(args.y, args.x, op, "y");
  }
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
    check_vector(args.beta, args.x, args.x.cols(), args.gamma.dtype, kOp, "beta");
  else
    check_absent(args.beta, kOp, "beta");
  check_statistics(args.kind, args.mean, args.rstd, args.x, kOp);
  check_outputs(args, kOp);
  check::tile_moments(args.moments, args.x, kOp);
  if (args.moments &&
      !(args.quantized.columnwise && norm_takes_moments(args.x, args.gamma, args.beta)))
    check::defined(args.y, kOp, "y");
  on_device(
      args.x, [&] { cpu::norm_forward(args); }, [&] { cuda::norm_forward(args, stream); });
}

void norm_backward(const NormBackwardArgs& args, Stream stream) {
  constexpr const char* kOp = "norm_backward";
  const int64_t cols = args.x.cols();
  check_input(args.x, args.gamma, kOp);
  check::high_precision(args.dy, kOp, "dy");
  check::same_shape(args.dy, args.x, kOp, "dy");
  check_statistics(args.kind, args.mean, args.rstd, args.x, kOp);
  check_like_x(args.dx, args.x, kOp, "dx");
  if (args.residual_grad) check_like_x(args.residual_grad, args.x, kOp, "residual_grad");
  check_vector(args.dgamma, args.x, cols, args.gamma.dtype, kOp, "dgamma");
  if (args.kind == NormKind::LayerNorm)
    check_vector(args.dbeta, args.x, cols, args.gamma.dtype, kOp, "dbeta");
  else
    check_absent(args.dbeta, kOp, "dbeta");
  check::column_sum_workspace(args.workspace, args.x, args.x.rows(), 2 * cols, kOp);
  on_device(
      args.x, [&] { cpu::norm_backward(args); }, [&] { cuda::norm_backward(args, stream); });
}

}  // namespace te
