#include "ops/quantize.h"

#include "ops/check.h"
#include "ops/dispatch.h"

namespace te {

namespace {

void check_tensor(const QuantizeArgs& args, std::string_view op) {
  const TensorView& x = args.x;
  check::input(x, op, "x");
  require(static_cast<bool>(args.out), Kind::Value, op,
          "expected a row-wise or a column-wise output, got neither");
  check::quantized(args.out, x.rows(), x.cols(), x, op);
}

}  // namespace

void quantize(const QuantizeArgs& args, Stream stream) {
  constexpr const char* kOp = "quantize";
  check_tensor(args, kOp);
  check::dbias(args.dbias, args.workspace, args.x, kOp);
  check::tile_moments(args.moments, args.x, kOp);
  on_device<cpu::quantize, cuda::quantize>(args.x, args, stream);
}

void quantize_many(const std::vector<QuantizeArgs>& all, Stream stream) {
  constexpr const char* kOp = "quantize_many";
  require(!all.empty(), Kind::Value, kOp, "expected tensors, got none");
  const QuantizeArgs& first = all.front();
  for (const QuantizeArgs& args : all) {
    check_tensor(args, kOp);
    check::same_device(args.x, first.x, kOp, "x");
    check::dtype(args.x, first.x.dtype, kOp, "x");
    require(args.out.dtype == first.out.dtype && !args.dbias && !args.moments, Kind::Value, kOp,
            "expected one format, and neither dbias nor moments");
  }
  on_device(
      first.x,
      [&] {
        for (const QuantizeArgs& args : all) cpu::quantize(args);
      },
      [&] { cuda::quantize_many(all, stream); });
}

}  // namespace te
