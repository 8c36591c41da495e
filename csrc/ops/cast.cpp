#include "ops/cast.h"

#include "ops/check.h"
#include "ops/dispatch.h"

namespace te {

void cast(const CastArgs& args, Stream stream) {
  constexpr const char* kOp = "cast";
  check::high_precision(args.x, kOp, "x");
  check::contiguous(args.x, kOp, "x");
  check::high_precision(args.y, kOp, "y");
  check::same_shape(args.y, args.x, kOp, "y");
  if (args.factor) {
    check::vector(args.factor, 1, DType::Float32, kOp, "the factor");
    check::same_device(args.factor, args.x, kOp, "the factor");
  }
  if (args.x.numel() == 0) return;
  on_device(
      args.x, [&] { cpu::cast(args); }, [&] { cuda::cast(args, stream); });
}

}  // namespace te
