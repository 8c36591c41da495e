// gemm: D = A * B^T, plus a matrix and a bias, for row-major matrices.
//   D is [m, n]. A is [m, k], B is [n, k]; a `transposed` operand is stored as [k, m] or [k, n].
//   fprop  y[M,N]  = x[M,K]  . w[N,K]^T              neither transposed
//   dgrad  dx[M,K] = dy[M,N] . w[N,K]                B transposed
//   wgrad  dw[N,K] = dy[M,N]^T . x[M,K]              both transposed
// Tensors of higher rank are read as 2-D: the last axis is a row, all others are merged into one.
// FP8 operands are never "transposed": tensor cores before Blackwell multiply only K-contiguous
// FP8, so callers hand in the stored transpose.
//
// With block scaling, both operands have a scale for each block (1 x 128 blocks in at least one of
// them), and the sum is that of dequantised elements. These operands are E4M3, and fast
// accumulation is not available.
//
// D is (1/scale_a)(1/scale_b) * sum over k, in fp32, plus the addend, plus bias[n] in each row; it
// is rounded once.
#pragma once

#include "core/scale_blocks.h"
#include "core/tensor_view.h"

namespace te {

struct GemmOperand {
  TensorView data;    // contiguous; FP8 codes carry their FP8 dtype
  TensorView scales;  // fp32, element 0 = 1 / scale, or those of blocks; absent for plain operands
  bool transposed = false;
  ScaleBlocks blocks = ScaleBlocks::Whole;
};

struct GemmArgs {
  GemmOperand a, b;
  TensorView d;                    // [m, n]: fp32, fp16 or bf16
  bool fast_accumulation = false;  // FP8: accumulate in the tensor cores' lower precision (fprop)
  TensorView addend;               // [m, n], of the dtype of D; may be D itself
  TensorView bias;                 // [n], of gemm_bias_dtype()
  TensorView workspace;            // CUDA: uint8, 32 MiB
  bool counts_tiles = false;       // CUDA: see cuda/gemm_algorithm.h
  bool allow_tf32 = true;          // fp32 operands on the tensor cores
};

// The dtype that a bias is read in: that of D, but FP8 operands take fp16 or bf16 only.
DType gemm_bias_dtype(DType operands, DType result);

// Checks the arguments, then multiplies on CUDA. Returns false, without having written anything, if
// torch has to compute the product: on the CPU (this project has no CPU GEMM), for k = 0, for block
// scales if n or k is less than a block, and for FP8 operands that the device or cuBLASLt does not
// multiply. kernels/gemm.py then evaluates the definition of the product in torch.
[[nodiscard]] bool gemm(const GemmArgs& args, Stream stream);

namespace cuda {
// Returns false if the device, or cuBLASLt, has no kernel for this product of FP8 operands.
bool gemm(const GemmArgs& args, Stream stream);
}  // namespace cuda

}  // namespace te
