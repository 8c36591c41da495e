#include "ops/amax.h"

#include "core/scaling.h"
#include "ops/check.h"
#include "ops/dispatch.h"

namespace te {
namespace {

void check_rule(const CurrentScale& scale, const char* op) {
  require(is_fp8(scale.dtype), Kind::Type, op, "expected an FP8 format, got ", scale.dtype);
  require(scale.epsilon >= 0.0f && is_finite(scale.epsilon), Kind::Value, op,
          "expected a finite epsilon of at least 0, got ", scale.epsilon);
}

void check_tensor(const AmaxArgs& args, const TensorView& like, const char* op) {
  const TensorView& x = args.x;
  check::input(x, op, "x");
  check::dtype(x, like.dtype, op, "x");
  check::same_device(x, like, op, "x");
  if (args.scale) {
    check_rule(args.scale, op);
    check::current_scale(args.scale, x, op);
  } else {
    check::vector(args.scale.amax, 1, DType::Float32, x, op, "amax");
    check::vector(args.scale.scratch, 2, DType::Int32, x, op, "the amax scratch");
  }
}

}  // namespace

void amax(std::span<const AmaxArgs> all, Stream stream) {
  constexpr const char* kOp = "amax";
  require(!all.empty(), Kind::Value, kOp, "expected tensors, got none");
  const TensorView& first = all.front().x;
  for (const AmaxArgs& args : all) check_tensor(args, first, kOp);
  on_device<cpu::amax, cuda::amax>(first, all, stream);
}

}  // namespace te
