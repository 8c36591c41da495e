// Norm forward to FP8, row-wise and transposed, in one pass. Transposed stores are efficient for
// tiles of many rows, and sums need whole rows. Such a tile exceeds the shared memory of one
// multiprocessor, so the blocks of a cluster share it. device/norm_tiles.cuh says what each warp
// does.
#include "cuda/device/norm_tiles.cuh"
#include "cuda/norm.h"
#include "cuda/policy/memoized.h"

namespace te::cuda {
namespace {

using norm_tiles::kThreads;
using norm_tiles::kUnitCols;
using norm_tiles::Problem;

constexpr const char* kOp = "norm_forward";

template <class In, NormKind kKind, int kRows, bool kMoments>
void launch(const Problem& p, int64_t clusters, Device device, cudaStream_t stream) {
  const auto kernel = norm_tiles::tile_kernel<In, kKind, kRows, kMoments>;
  static OncePerDevice once;
  once(device, [&] { allow_shared_memory(reinterpret_cast<const void*>(kernel), device, kOp); });
  LaunchAttributes attributes(device_limits(device), p.policy.cluster);
  cudaLaunchConfig_t config{};
  config.gridDim = dim3(static_cast<unsigned>(clusters * p.policy.cluster));
  config.blockDim = dim3(kThreads);
  config.dynamicSmemBytes = static_cast<size_t>(norm_tiles_bytes(p.policy, sizeof(In)));
  config.stream = stream;
  attributes.add_to(config);
  check(cudaLaunchKernelEx(&config, kernel, p), kOp);
}

NormTilesPolicy policy_of(const TensorView& x) {
  const NormTilesShape shape{x.rows(), x.cols(), size_of(x.dtype), device_limits(x.device)};
  return memoized(shape, shape.rows + shape.cols / 8, norm_tiles_policy);
}

bool fits(const NormForwardArgs& args) {
  if (!args.quantized || args.current || args.x.cols() % 8 != 0) return false;
  if (args.y && args.y.dtype != args.x.dtype) return false;
  for (const TensorView* t : {&args.x, &args.gamma, &args.beta, &args.y})
    if (!is_aligned(t->data, 16)) return false;
  return is_aligned(args.quantized.rowwise.data, 8);
}

}  // namespace

bool norm_tiles_take_moments(const TensorView& x) {
  return size_of(x.dtype) == 2 && x.cols() % kUnitCols == 0 && policy_of(x).rows != 0;
}

bool norm_forward_tiles(const NormForwardArgs& args, cudaStream_t stream) {
  if (!fits(args)) return false;
  const NormTilesPolicy policy = policy_of(args.x);
  if (policy.rows == 0) return false;
  const int64_t tiles = std::max<int64_t>(ceil_div(args.x.rows(), policy.rows), 1);
  const int64_t clusters = norm_tiles_clusters(policy, tiles, device_limits(args.x.device));
  const bool moments = args.moments && norm_tiles_take_moments(args.x);
  const Problem p{.x = args.x.data,
                  .gamma = args.gamma.data,
                  .beta = args.beta.data,
                  .gamma_dtype = args.gamma.dtype,
                  .gamma_offset = args.zero_centered ? 1.0f : 0.0f,
                  .epsilon = args.epsilon,
                  .inverse_cols = 1.0f / static_cast<float>(args.x.cols()),
                  .rows = args.x.rows(),
                  .cols = static_cast<int>(args.x.cols()),
                  .tiles = static_cast<int>(tiles),
                  .policy = policy,
                  .y = args.y.data,
                  .e5m2 = args.quantized.dtype == DType::Float8E5M2,
                  .fp8 = sink_of(args.quantized),
                  .mean = args.mean.ptr<float>(),
                  .rstd = args.rstd.ptr<float>(),
                  .moments = tile_moments_sink_of(moments ? args.moments : MomentsSink{},
                                                  clusters * policy.cluster, args.x.numel())};
  dispatch_high_precision(args.x.dtype, kOp, [&](auto tag) {
    dispatch_bool(args.kind == NormKind::LayerNorm, [&](auto layer) {
      using In = typename decltype(tag)::type;
      constexpr auto kKind = layer() ? NormKind::LayerNorm : NormKind::RMSNorm;
      dispatch_moments<In, true>(moments, [&](auto takes) {
        if (policy.rows == 64)
          launch<In, kKind, 64, takes()>(p, clusters, args.x.device, stream);
        else
          launch<In, kKind, 32, takes()>(p, clusters, args.x.device, stream);
      });
    });
  });
  return true;
}

}  // namespace te::cuda
