#include "ops/activation.h"

#include <cmath>

#include "ops/check.h"
#include "ops/dispatch.h"

namespace te {
namespace {

// The outputs that forward and backward have in common: plain tensor, FP8 result, current scale and
// moments.
struct Result {
  const TensorView& plain;
  const QuantizedView& quantized;
  const CurrentScale& current;
  const MomentsSink& moments;
  bool takes_moments;
};

void check_parameters(const ActivationParameters& p, std::string_view op) {
  require(p.limit > 0.0f && std::isfinite(p.limit), Kind::Value, op,
          "expected a finite limit above 0, got ", p.limit);
  require(p.alpha > 0.0f && std::isfinite(p.alpha), Kind::Value, op,
          "expected a finite alpha above 0, got ", p.alpha);
  require(std::isfinite(p.offset), Kind::Value, op, "expected a finite offset, got ", p.offset);
}

void check_input(ActivationKind kind, const ActivationParameters& parameters, const TensorView& x,
                 std::string_view op) {
  if (kind == ActivationKind::ClampedSwiglu) check_parameters(parameters, op);
  check::input(x, op, "x");
  require(!is_gated(kind) || x.cols() % 2 == 0, Kind::Value, op,
          "expected an even last size of x, which a gated activation halves, got shape ",
          ShapeOf{x});
}

// A view with the shape, dtype and device of y and dy, to compare with. Its data are not used.
TensorView half_of(ActivationKind kind, const TensorView& x) {
  TensorView y = x;
  if (is_gated(kind)) y.sizes[static_cast<size_t>(x.rank - 1)] /= 2;
  return y;
}

void check_result(const Result& result, const TensorView& like, std::string_view op,
                  std::string_view name) {
  if (result.plain) check::alike(result.plain, like.dtype, like, op, name);
  if (result.quantized) check::quantized(result.quantized, like.rows(), like.cols(), like, op);
  check::running_amax(result.quantized, like, op);
  check::tile_moments(result.moments, like, op);
  if (result.moments && !result.takes_moments) check::defined(result.plain, op, name);
  if (!result.current) return;
  check::defined(result.plain, op, name);
  check::current_scale(result.current, like, op);
  require(!result.quantized, Kind::Value, op, "expected FP8 outputs or a current scale, got both");
}

void check_again(const ActivationBackwardArgs& args, std::string_view op) {
  const auto& [y, quantized, rounded] = args.again;
  require(!args.moments, Kind::Value, op, "expected moments or the result of forward, got both");
  require(!(y && quantized) && !quantized.rowwise, Kind::Value, op,
          "expected y or its transposed codes alone");
  check_result({y, quantized, {}, {}, true}, args.dy, op, "y");
}

}  // namespace

bool activation_takes_moments(const TensorView& x, const TensorView& dy) {
  return x.device.type == DeviceType::CUDA && size_of(x.dtype) == 2 && x.cols() % 16 == 0 &&
         is_aligned(x.data, 16) && is_aligned(dy.data, 16);
}

void activation_forward(const ActivationForwardArgs& args, Stream stream) {
  constexpr const char* kOp = "activation_forward";
  check_input(args.kind, args.parameters, args.x, kOp);
  require(args.y || args.quantized, Kind::Value, kOp,
          "expected a plain or an FP8 output, got neither");
  check_result(
      {args.y, args.quantized, args.current, args.moments, activation_takes_moments(args.x, {})},
      half_of(args.kind, args.x), kOp, "y");
  on_device<cpu::activation_forward, cuda::activation_forward>(args.x, args, stream);
}

void activation_backward(const ActivationBackwardArgs& args, Stream stream) {
  constexpr const char* kOp = "activation_backward";
  check_input(args.kind, args.parameters, args.x, kOp);
  check::alike(args.dy, args.x.dtype, half_of(args.kind, args.x), kOp, "dy");
  require(args.dx || args.quantized || args.dbias, Kind::Value, kOp,
          "expected dx, an FP8 output or dbias, got none of them");
  check_result({args.dx, args.quantized, args.current, args.moments,
                activation_takes_moments(args.x, args.dy)},
               args.x, kOp, "dx");
  check::dbias(args.dbias, args.workspace, args.x, kOp);
  if (args.again) check_again(args, kOp);
  on_device<cpu::activation_backward, cuda::activation_backward>(args.x, args, stream);
}

}  // namespace te
