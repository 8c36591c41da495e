#include "ops/softmax.h"

#include "ops/check.h"
#include "ops/dispatch.h"

namespace te {
namespace {

void scores(const TensorView& t, std::string_view op, std::string_view name) {
  check::input(t, op, name);
  require(t.rank == 4, Kind::Value, op, "expected ", name,
          " of shape (batch, heads, queries, keys), got ", ShapeOf{t});
}

void masked_by(const TensorView& mask, const TensorView& x, std::string_view op) {
  check::dtype(mask, DType::Bool, op, "the mask");
  check::same_device(mask, x, op, "the mask");
  bool same = mask.rank == x.rank;
  for (int i = 0; same && i < x.rank; ++i) same = mask.size(i) == x.size(i);
  require(same, Kind::Value, op, "expected a mask expanded to shape ", ShapeOf{x}, ", got ",
          ShapeOf{mask});
  const int64_t step = mask.stride(-1);
  require(step == 0 || step == 1 || x.cols() <= 1, Kind::Value, op,
          "expected a mask with its keys side by side (stride 1) or repeated (stride 0), got "
          "stride ",
          step);
}

// Checks that the sides of the window and its diagonal are below 2^48: more than the length of any
// tensor, and so small that sums of three of them do not overflow.
void within_reach(const AttentionWindow& window, std::string_view op) {
  constexpr int64_t kLimit = int64_t{1} << 48;
  for (const int64_t value : {window.left, window.right, window.diagonal, -window.diagonal})
    require(value < kLimit, Kind::Value, op, "expected window sides and diagonal below 2^48, got ",
            window.left, ", ", window.right, " and ", window.diagonal);
}

}  // namespace

void softmax_forward(const SoftmaxForwardArgs& args, Stream stream) {
  constexpr const char* kOp = "softmax_forward";
  scores(args.x, kOp, "x");
  check::alike(args.y, args.x.dtype, args.x, kOp, "y");
  if (args.mask) masked_by(args.mask, args.x, kOp);
  within_reach(args.window, kOp);
  if (args.x.numel() == 0) return;
  on_device<cpu::softmax_forward, cuda::softmax_forward>(args.x, args, stream);
}

void softmax_backward(const SoftmaxBackwardArgs& args, Stream stream) {
  constexpr const char* kOp = "softmax_backward";
  scores(args.dy, kOp, "dy");
  check::alike(args.y, args.dy.dtype, args.dy, kOp, "y");
  check::alike(args.dx, args.dy.dtype, args.dy, kOp, "dx");
  if (args.dy.numel() == 0) return;
  on_device<cpu::softmax_backward, cuda::softmax_backward>(args.dy, args, stream);
}

}  // namespace te
