// The arguments of the two fast kernels of norm_backward, and the dtypes for which both are
// compiled.
#pragma once

#include "cuda/launch.h"
#include "ops/norm.h"

namespace te::cuda {

struct NormBackwardProblem {
  const void* dy = nullptr;
  const void* x = nullptr;
  const void* gamma = nullptr;
  const void* residual_grad = nullptr;  // null: none
  void* dx = nullptr;
  DType gamma_dtype = DType::Float32;
  float gamma_offset = 0.0f;  // 1 with a zero-centred gamma
  float inverse_cols = 0.0f;
  int rows = 0;
  int cols = 0;
  const float* mean = nullptr;
  const float* rstd = nullptr;
  float* partials = nullptr;  // [parts][2][cols]: dgamma, dbeta

  explicit NormBackwardProblem(const NormBackwardArgs& args)
      : dy(args.dy.data),
        x(args.x.data),
        gamma(args.gamma.data),
        residual_grad(args.residual_grad.data),
        dx(args.dx.data),
        gamma_dtype(args.gamma.dtype),
        gamma_offset(args.zero_centered ? 1.0f : 0.0f),
        inverse_cols(1.0f / static_cast<float>(args.x.cols())),
        rows(static_cast<int>(args.x.rows())),
        cols(static_cast<int>(args.x.cols())),
        mean(args.mean.ptr<float>()),
        rstd(args.rstd.ptr<float>()),
        partials(args.workspace.memory.ptr<float>()) {}

  // Whether the kernels can use accesses of 16 bytes and 32-bit indices, and are compiled for the
  // dtypes.
  static bool fits(const NormBackwardArgs& args) {
    for (const TensorView* t :
         {&args.x, &args.dy, &args.residual_grad, &args.dx, &args.workspace.memory})
      if (!is_aligned(t->data, 16)) return false;
    const bool usual = args.dy.dtype == args.x.dtype || args.x.dtype == DType::Float32;
    const int64_t rows = args.x.rows(), cols = args.x.cols();
    return usual && cols % 8 == 0 && rows > 0 && rows < (1 << 30) && cols < (1 << 20);
  }

  // Values that a thread handles at a time: 16 bytes of the wider one of x and dy.
  static int64_t pack(const NormBackwardArgs& args) {
    return size_of(args.x.dtype) + size_of(args.dy.dtype) == 4 ? 8 : 4;
  }
};

// Calls f(Tag of x, Tag of dy, constant of the kind). `args` must fit.
template <class F>
auto with_norm_backward_types(const NormBackwardArgs& args, F&& f) {
  return dispatch_high_precision(args.x.dtype, "norm_backward", [&](auto tag) {
    return dispatch_bool(args.kind == NormKind::LayerNorm, [&](auto layer) {
      constexpr auto kKind = layer() ? NormKind::LayerNorm : NormKind::RMSNorm;
      const std::integral_constant<NormKind, kKind> kind;
      if (args.dy.dtype == args.x.dtype) return f(tag, tag, kind);
      if (args.dy.dtype == DType::BFloat16) return f(Tag<float>{}, Tag<BFloat16>{}, kind);
      return f(Tag<float>{}, Tag<Half>{}, kind);
    });
  });
}

}  // namespace te::cuda
