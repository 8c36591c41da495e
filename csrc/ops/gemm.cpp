#include "ops/gemm.h"

#include <algorithm>

#include "ops/check.h"

namespace te {
namespace {

constexpr const char* kOp = "gemm";

struct Sizes {
  int64_t m, n, k;
};

std::ostream& operator<<(std::ostream& out, Sizes s) {
  return out << "m = " << s.m << ", n = " << s.n << ", k = " << s.k;
}

void check_operand(const GemmOperand& operand, std::string_view name) {
  const TensorView& data = operand.data;
  check::contiguous(data, kOp, name);
  require(data.rank > 0, Kind::Value, kOp, "expected ", name, " with at least one axis, got ",
          data);
  if (!is_fp8(data.dtype)) return check::high_precision(data, kOp, name);
  require(!operand.transposed, Kind::Value, kOp, "expected FP8 ", name,
          " with k as its last axis (hand in the stored transpose), got it marked as transposed");
  require(static_cast<bool>(operand.scales), Kind::Value, kOp, "expected scales with FP8 ", name,
          ", got none");
  if (operand.blocks != ScaleBlocks::Whole)
    return check::block_scales(operand.scales, operand.blocks, data.rows(), data.cols(), data, kOp,
                               "the scales of an operand");
  check::contiguous(operand.scales, kOp, "the scales of an operand");
  check::dtype(operand.scales, DType::Float32, kOp, "the scales of an operand");
  check::same_device(operand.scales, data, kOp, "the scales of an operand");
  require(operand.scales.numel() > 0, Kind::Value, kOp,
          "expected at least one element in the scales of FP8 ", name, ", got none");
}

// Checks the scales, after both operands were found to be FP8 and to have the same k.
void check_blocks(const GemmArgs& args, const Sizes& sizes) {
  const ScaleBlocks a = args.a.blocks, b = args.b.blocks;
  if (a == ScaleBlocks::Whole && b == ScaleBlocks::Whole) return;
  require(a != ScaleBlocks::Whole && b != ScaleBlocks::Whole, Kind::Unsupported, kOp,
          "expected block scales in both operands or in neither, got ", a, " and ", b);
  require(a == ScaleBlocks::Rows || b == ScaleBlocks::Rows, Kind::Unsupported, kOp,
          "Only 1D by 1D, 1D by 2D, and 2D by 1D block scaling can be multiplied: expected 1 x 128 "
          "blocks in an operand, got 128 x 128 blocks in both");
  require(sizes.m % 8 == 0, Kind::Value, kOp,
          "dimension requirement of block scaling: expected m to be a multiple of 8, got ", sizes);
  require(args.a.data.dtype == DType::Float8E4M3 && args.b.data.dtype == DType::Float8E4M3,
          Kind::Unsupported, kOp, "expected float8_e4m3 operands with block scales, got ",
          args.a.data.dtype, " and ", args.b.data.dtype);
  require(!args.fast_accumulation, Kind::Unsupported, kOp,
          "expected split accumulation with block scales (the hardware library answers "
          "CUBLAS_STATUS_NOT_SUPPORTED to another), got fast accumulation");
}

Sizes check_operands(const GemmArgs& args) {
  const TensorView& a = args.a.data;
  const TensorView& b = args.b.data;
  check_operand(args.a, "a");
  check_operand(args.b, "b");
  check::same_device(b, a, kOp, "b");
  require(is_fp8(a.dtype) == is_fp8(b.dtype), Kind::Type, kOp,
          "expected both operands in FP8 or neither, got ", a.dtype, " and ", b.dtype);
  require(is_fp8(a.dtype) || a.dtype == b.dtype, Kind::Type, kOp,
          "expected operands of one dtype, got ", a.dtype, " and ", b.dtype);
  require(!(a.dtype == DType::Float8E5M2 && b.dtype == DType::Float8E5M2), Kind::Unsupported, kOp,
          "expected at most one operand in float8_e5m2 (the hardware library multiplies no such "
          "pair), got two");
  const int64_t k = args.a.transposed ? a.rows() : a.cols();
  const int64_t k_of_b = args.b.transposed ? b.rows() : b.cols();
  require(k == k_of_b, Kind::Value, kOp, "expected operands that share k, got k = ", k,
          " in a of shape ", ShapeOf{a}, " and k = ", k_of_b, " in b of shape ", ShapeOf{b});
  const Sizes sizes{args.a.transposed ? a.cols() : a.rows(),
                    args.b.transposed ? b.cols() : b.rows(), k};
  require(!is_fp8(a.dtype) || (sizes.k % 16 == 0 && sizes.n % 16 == 0), Kind::Value, kOp,
          "expected n and k to be multiples of 16 for FP8 operands, got ", sizes);
  if (is_fp8(a.dtype)) check_blocks(args, sizes);
  return sizes;
}

void check_result(const GemmArgs& args, const Sizes& sizes) {
  const TensorView& a = args.a.data;
  check::input(args.d, kOp, "the result");
  check::same_device(args.d, a, kOp, "the result");
  require(args.d.rows() == sizes.m && args.d.cols() == sizes.n, Kind::Value, kOp,
          "expected the result of ", sizes.m, " x ", sizes.n, " elements, got shape ",
          ShapeOf{args.d});
  require(is_fp8(a.dtype) || args.d.dtype == a.dtype || args.d.dtype == DType::Float32, Kind::Type,
          kOp, "expected a result in ", a.dtype, " or float32 for ", a.dtype, " operands, got ",
          args.d.dtype);
}

void check_addend(const GemmArgs& args) {
  if (!args.addend) return;
  const TensorView& d = args.d;
  check::contiguous(args.addend, kOp, "the addend");
  check::dtype(args.addend, d.dtype, kOp, "the addend");
  check::same_device(args.addend, d, kOp, "the addend");
  require(args.addend.rows() == d.rows() && args.addend.cols() == d.cols(), Kind::Value, kOp,
          "expected the addend of ", d.rows(), " x ", d.cols(), " elements, got shape ",
          ShapeOf{args.addend});
}

void check_bias(const GemmArgs& args, const Sizes& sizes) {
  if (!args.bias) return;
  const TensorView& a = args.a.data;
  check::vector(args.bias, sizes.n, gemm_bias_dtype(a.dtype, args.d.dtype), a, kOp, "bias");
}

// Whether n or k is less than a block, so that cuBLASLt's kernels for block scales are not used.
bool is_small(const GemmArgs& args, const Sizes& sizes) {
  return args.a.blocks != ScaleBlocks::Whole && std::min(sizes.n, sizes.k) < kScaleBlock;
}

}  // namespace

DType gemm_bias_dtype(DType operands, DType result) {
  if (!is_fp8(operands)) return result;
  return result == DType::Float16 ? DType::Float16 : DType::BFloat16;
}

bool gemm(const GemmArgs& args, Stream stream) {
  const Sizes sizes = check_operands(args);
  check_result(args, sizes);
  check_addend(args);
  check_bias(args, sizes);
  if (args.a.data.device.type == DeviceType::CPU || sizes.k == 0 || is_small(args, sizes))
    return false;
  check::contiguous(args.workspace, kOp, "the workspace");
  check::same_device(args.workspace, args.a.data, kOp, "the workspace");
  return sizes.m == 0 || sizes.n == 0 || cuda::gemm(args, stream);
}

}  // namespace te
