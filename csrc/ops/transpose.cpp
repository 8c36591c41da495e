#include "ops/transpose.h"

#include "ops/check.h"
#include "ops/dispatch.h"

namespace te {

void transpose(const TransposeArgs& args, Stream stream) {
  constexpr const char* kOp = "transpose";
  const TensorView &x = args.x, &out = args.out;
  check::contiguous(x, kOp, "x");
  require(size_of(x.dtype) == 1, Kind::Type, kOp, "expected one-byte elements, got ", x.dtype);
  check::dtype(out, x.dtype, kOp, "the output");
  check::same_device(out, x, kOp, "the output");
  require(out.rows() == x.cols() && out.cols() == x.rows(), Kind::Value, kOp, "expected ", x.cols(),
          " x ", x.rows(), " elements for the output, got shape ", ShapeOf{out});
  const bool apart = out.rank == 2 && out.stride(1) == 1 && out.stride(0) >= x.rows();
  require(out.is_contiguous() || apart, Kind::Value, kOp,
          "expected each row of the output in memory of its own, got ", out);
  if (args.scales || args.out_scales) {
    check::contiguous(out, kOp, "the output");
    const auto blocks = ScaleBlocks::Squares;
    check::block_scales(args.scales, blocks, x.rows(), x.cols(), x, kOp, "scales");
    check::block_scales(args.out_scales, blocks, x.cols(), x.rows(), x, kOp, "the output's scales");
  }
  on_device<cpu::transpose, cuda::transpose>(x, args, stream);
}

}  // namespace te
