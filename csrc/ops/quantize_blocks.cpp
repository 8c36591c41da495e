#include "ops/quantize_blocks.h"

#include <array>

#include "ops/check.h"
#include "ops/dispatch.h"

namespace te {
namespace {

constexpr const char* kOp = "quantize_blocks";

// `names`: of the codes and of their scales.
void check_side(const BlockCodes& side, ScaleBlocks blocks, int64_t rows, int64_t cols,
                const TensorView& like, const std::array<const char*, 2>& names) {
  if (!side) return;
  check::codes(side.codes, rows, cols, like, kOp, names[0]);
  check::block_scales(side.scales, blocks, rows, cols, like, kOp, names[1]);
}

}  // namespace

void quantize_blocks(const QuantizeBlocksArgs& args, Stream stream) {
  const TensorView& x = args.x;
  check::input(x, kOp, "x");
  require(is_fp8(args.dtype), Kind::Type, kOp, "expected an FP8 format, got ", args.dtype);
  require(args.blocks == ScaleBlocks::Rows || args.blocks == ScaleBlocks::Squares, Kind::Value, kOp,
          "expected blocks of 1 or 2 dimensions, got ", static_cast<int32_t>(args.blocks));
  require(args.rowwise || args.columnwise, Kind::Value, kOp,
          "expected a row-wise or a column-wise output, got neither");
  require(args.epsilon >= 0.0f, Kind::Value, kOp, "expected epsilon >= 0, got ", args.epsilon);
  check_side(args.rowwise, args.blocks, x.rows(), x.cols(), x,
             {"the row-wise output", "the row-wise scales"});
  check_side(args.columnwise, args.blocks, x.cols(), x.rows(), x,
             {"the column-wise output", "the column-wise scales"});
  check::dbias(args.dbias, args.workspace, x, kOp);
  on_device<cpu::quantize_blocks, cuda::quantize_blocks>(x, args, stream);
}

}  // namespace te
