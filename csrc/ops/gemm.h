// gemm: D = A * B^T (+ D) with an epilogue, in row-major words.
//   D is [m, n]. A is [m, k], or [k, m] with `a_transposed`. B is [n, k], or [k, n] with `b_transposed`.
//   fprop  y[M,N]  = x[M,K]  . w[N,K]^T              neither transposed   ("TN")
//   dgrad  dx[M,K] = dy[M,N] . w[N,K]                b_transposed         ("NN")
//   wgrad  dw[N,K] = dy[M,N]^T . x[M,K]              both transposed      ("NT")
// FP8 operands are never "transposed": sm_90 multiplies only K-contiguous FP8, so callers hand in
// the stored transpose. CUDA only: on the CPU the module layer uses torch.matmul on dequantised
// operands (docs/adr).
#pragma once

#include <cstddef>

#include "core/quantized_view.h"

namespace te {

struct GemmOperand {
  TensorView data;     // rank 2, contiguous; FP8 codes carry their FP8 dtype
  TensorView scales;   // fp32, element 0 = 1 / scale; absent for plain operands
  bool transposed = false;
};

enum class GemmActivation : int32_t { None = 0, Gelu = 1, GeluBackward = 2 };

struct GemmArgs {
  GemmOperand a, b;
  TensorView d;               // [m, n]: fp32, fp16 or bf16; absent where `d_quantized` is given
  QuantizedView d_quantized;  // FP8 result: row-wise codes, scale, scales, amax
  bool accumulate = false;  // D += ; fp32 or bf16 D
  bool fast_accumulation = false;  // FP8: keep the tensor core's short accumulator (fprop)
  TensorView bias;          // [n], added before the activation
  TensorView bias_grad;     // [m], written: the sum of A over k (in wgrad: the bias gradient)
  GemmActivation activation = GemmActivation::None;
  TensorView aux;           // [m, n] pre-activation: written by Gelu, read by GeluBackward
  TensorView workspace;     // uint8, 32 MiB class
  bool allow_tf32 = true;   // fp32 operands on the tensor cores
};

void gemm(const GemmArgs& args, Stream stream);

namespace cuda {
void gemm(const GemmArgs& args, Stream stream);
}

}  // namespace te
