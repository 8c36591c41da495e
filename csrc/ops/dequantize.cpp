#include "ops/dequantize.h"

#include "ops/check.h"
#include "ops/dispatch.h"

namespace te {

void dequantize(const DequantizeArgs& args, Stream stream) {
  constexpr const char* kOp = "dequantize";
  require(is_fp8(args.dtype), Kind::Type, kOp, "expected an FP8 format, got ", args.dtype);
  check::contiguous(args.q, kOp, "the codes");
  require(size_of(args.q.dtype) == 1, Kind::Type, kOp, "expected one-byte codes, got ",
          args.q.dtype);
  check::values_like(args.x, args.q, kOp, "the output");
  if (args.blocks == ScaleBlocks::Whole) {
    check::contiguous(args.scales, kOp, "scales");
    check::dtype(args.scales, DType::Float32, kOp, "scales");
    check::same_device(args.scales, args.q, kOp, "scales");
    require(args.scales.numel() >= 1, Kind::Value, kOp, "expected 1 or 2 scales, got none");
  } else {
    check::block_scales(args.scales, args.blocks, args.q.rows(), args.q.cols(), args.q, kOp,
                        "scales");
  }
  on_device<cpu::dequantize, cuda::dequantize>(args.q, args, stream);
}

}  // namespace te
