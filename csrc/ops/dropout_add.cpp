#include "ops/dropout_add.h"

#include "ops/check.h"
#include "ops/dispatch.h"

namespace te {
namespace {

void randomness(const TensorView& seed, float p, const TensorView& like, std::string_view op) {
  require(p >= 0.0f && p < 1.0f, Kind::Value, op, "expected a probability 0 <= p < 1, got ", p);
  if (p == 0.0f) return;
  check::vector(seed, 1, DType::Int64, like, op, "the seed");
}

}  // namespace

void dropout_add_forward(const DropoutAddForwardArgs& args, Stream stream) {
  constexpr const char* kOp = "dropout_add_forward";
  const TensorView& x = args.x;
  check::input(x, kOp, "x");
  check::values_like(args.out, x, kOp, "out");
  if (args.bias) check::vector(args.bias, x.cols(), x.dtype, x, kOp, "the bias");
  if (args.residual) check::alike(args.residual, args.out.dtype, x, kOp, "the residual");
  randomness(args.seed, args.p, x, kOp);
  if (x.numel() == 0) return;
  on_device<cpu::dropout_add_forward, cuda::dropout_add_forward>(x, args, stream);
}

void dropout_add_backward(const DropoutAddBackwardArgs& args, Stream stream) {
  constexpr const char* kOp = "dropout_add_backward";
  const TensorView& dout = args.dout;
  check::input(dout, kOp, "dout");
  require(args.dx || args.dbias, Kind::Value, kOp, "expected an output dx or dbias, got neither");
  if (args.dx) check::values_like(args.dx, dout, kOp, "dx");
  check::dbias(args.dbias, args.workspace, dout, kOp);
  randomness(args.seed, args.p, dout, kOp);
  on_device<cpu::dropout_add_backward, cuda::dropout_add_backward>(dout, args, stream);
}

}  // namespace te
