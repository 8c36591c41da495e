// Norm backward of narrow rows: dx, and partial sums of dgamma and dbeta, in one pass over x and dy
// (device/norm_backward_narrow.cuh). The kernel is persistent, with one block on each
// multiprocessor.
#include "cuda/device/norm_backward_narrow.cuh"

#include "cuda/column_sum.h"
#include "cuda/device/dependent_launch.cuh"
#include "cuda/norm.h"
#include "cuda/policy/norm.h"
#include "ops/column_sum.h"

namespace te::cuda {
namespace {

template <class In, class Gradient, NormKind kKind>
__global__ void __launch_bounds__(kNormNarrowThreads, 1)
    narrow_kernel(const __grid_constant__ NormBackwardProblem p) {
  follow_previous_kernel();
  extern __shared__ __align__(16) float memory[];
  norm_narrow::Worker<In, Gradient, kKind>(p, memory).run();
}

template <class In, class Gradient, NormKind kKind>
void launch(const NormBackwardProblem& p, const NormNarrowPolicy& policy, cudaStream_t stream) {
  const dim3 block(static_cast<unsigned>(policy.lanes), static_cast<unsigned>(policy.rows));
  const auto warps = static_cast<size_t>(policy.lanes * policy.rows / 32);
  launch_dependent(narrow_kernel<In, Gradient, kKind>, static_cast<unsigned>(policy.blocks), block,
                   warps * static_cast<size_t>(p.cols) * sizeof(float), stream, p);
}

}  // namespace

bool norm_backward_narrow(const NormBackwardArgs& args, cudaStream_t stream) {
  if (!NormBackwardProblem::fits(args)) return false;
  const int64_t rows = args.x.rows();
  const NormNarrowPolicy policy = norm_narrow_policy(
      rows, ceil_div(args.x.cols(), NormBackwardProblem::pack(args)),
      std::min<int64_t>(multiprocessors(args.x.device), ceil_div(rows, kRowsPerColumnPart)));
  if (policy.lanes == 0) return false;
  const NormBackwardProblem p(args);
  with_norm_backward_types(args, [&](auto x, auto dy, auto kind) {
    using In = typename decltype(x)::type;
    using Gradient = typename decltype(dy)::type;
    launch<In, Gradient, kind()>(p, policy, stream);
  });
  finish_column_sums(args.workspace, policy.blocks, 2 * args.x.cols(), args.dgamma, args.dbeta,
                     stream);
  return true;
}

}  // namespace te::cuda
