#include "ops/quantize.h"

#include "ops/check.h"
#include "ops/dispatch.h"

namespace te {

void quantize(const QuantizeArgs& args, Stream stream) {
  constexpr const char* kOp = "quantize";
  const TensorView& x = args.x;
  check::high_precision(x, kOp, "x");
  check::contiguous(x, kOp, "x");
  require(static_cast<bool>(args.out), Kind::Value, kOp,
          "expected a row-wise or a column-wise output, got neither");
  check::quantized(args.out, x.rows(), x.cols(), x, kOp);
  check::dbias(args.dbias, args.workspace, x, kOp);
  check::tile_moments(args.moments, x, kOp);
  on_device(
      x, [&] { cpu::quantize(args); }, [&] { cuda::quantize(args, stream); });
}

}  // namespace te
