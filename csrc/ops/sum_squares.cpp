#include "ops/sum_squares.h"

#include "ops/check.h"
#include "ops/dispatch.h"

namespace te {

void sum_squares(const SumSquaresArgs& args, Stream stream) {
  constexpr const char* kOp = "sum_squares";
  int64_t blocks = 0;
  for (const TensorView& x : args.tensors) {
    check::contiguous(x, kOp, "a tensor");
    check::high_precision(x, kOp, "a tensor");
    check::same_device(x, args.tensors.front(), kOp, "a tensor");
    blocks += sum_squares_blocks(x);
  }
  check::vector(args.sums, blocks, DType::Float32, kOp, "sums");
  if (blocks == 0) return;
  check::same_device(args.sums, args.tensors.front(), kOp, "sums");
  on_device<cpu::sum_squares, cuda::sum_squares>(args.sums, args, stream);
}

}  // namespace te
