#include "ops/moments.h"

#include "ops/check.h"
#include "ops/dispatch.h"

namespace te {

void moments(const MomentsArgs& args, Stream stream) {
  constexpr const char* kOp = "moments";
  check::high_precision(args.x, kOp, "x");
  check::contiguous(args.x, kOp, "x");
  check::moments(args.out, kMomentsFields, args.x, kOp);
  on_device(
      args.x, [&] { cpu::moments(args); }, [&] { cuda::moments(args, stream); });
}

void cast_moments(const CastMomentsArgs& args, Stream stream) {
  constexpr const char* kOp = "cast_moments";
  check::high_precision(args.x, kOp, "x");
  check::contiguous(args.x, kOp, "x");
  require(is_fp8(args.format), Kind::Type, kOp, "expected an FP8 format, got ", args.format);
  check::same_shape(args.codes, args.x, kOp, "codes");
  require(size_of(args.codes.dtype) == 1, Kind::Type, kOp, "expected one-byte codes, got ",
          args.codes.dtype);
  check::vector(args.scales, 2, DType::Float32, kOp, "scales");
  check::same_device(args.scales, args.x, kOp, "scales");
  check::moments(args.out, kCastMomentsFields, args.x, kOp);
  on_device(
      args.x, [&] { cpu::cast_moments(args); }, [&] { cuda::cast_moments(args, stream); });
}

}  // namespace te
