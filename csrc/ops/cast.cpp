#include "ops/cast.h"

#include "ops/check.h"
#include "ops/dispatch.h"

namespace te {

void cast(const CastArgs& args, Stream stream) {
  constexpr const char* kOp = "cast";
  check::input(args.x, kOp, "x");
  check::values_like(args.y, args.x, kOp, "y");
  if (args.factor) check::vector(args.factor, 1, DType::Float32, args.x, kOp, "the factor");
  if (args.x.numel() == 0) return;
  on_device<cpu::cast, cuda::cast>(args.x, args, stream);
}

}  // namespace te
