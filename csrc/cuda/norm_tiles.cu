// Norm forward to FP8, row-wise and transposed, in one pass. Transposed stores want many rows, sums
// want whole rows, and both together exceed one multiprocessor: a cluster of blocks shares the
// tile. What each warp does stands in device/norm_tiles.cuh.
#include "cuda/device/norm_tiles.cuh"

#include <array>
#include <utility>

#include "cuda/device/dependent_launch.cuh"
#include "cuda/norm.h"

namespace te::cuda {
namespace {

using norm_tiles::kGroups;
using norm_tiles::kThreads;
using norm_tiles::kUnitCols;
using norm_tiles::kWarps;
using norm_tiles::Problem;
using norm_tiles::Worker;

constexpr const char* kOp = "norm_forward";

template <class In, NormKind kKind, int kRows, bool kMoments>
__global__ void __launch_bounds__(kThreads, 1) tile_kernel(const __grid_constant__ Problem p) {
  extern __shared__ __align__(128) uint8_t memory[];
  __shared__ norm_tiles::Shared shared;
  [[maybe_unused]] __shared__ TileMoments<kGroups * kWarps> moments;
  const Worker<In, kKind, kRows> worker(p, shared, memory);
  worker.init_barriers();
  follow_previous_kernel();
  GatheredMoments<In, kMoments, double> gathered;
  const float amax = warp_reduce(worker.run(gathered), Max{});
  const int warp = static_cast<int>(threadIdx.x) / 32;
  if constexpr (kMoments) {
    cluster_arrive();
    cluster_wait();
    if (p.moments) moments.leave(worker.moments(gathered));
  } else {
    if (!p.fp8.amax) return;
  }
  if (threadIdx.x % 32 == 0) shared.amaxes[warp] = amax;
  __syncthreads();
  if constexpr (kMoments) {
    if (warp == kGroups * kWarps - 1 && p.moments)
      moments.finish(p.moments, static_cast<int>(blockIdx.x));
  }
  if (threadIdx.x != 0 || !p.fp8.amax) return;
  float block_amax = amax;
  for (const float of_warp : shared.amaxes) block_amax = fmaxf(block_amax, of_warp);
  atomic_max(p.fp8.amax, block_amax);
}

template <class In, NormKind kKind, int kRows, bool kMoments>
void launch(const Problem& p, int64_t clusters, Device device, cudaStream_t stream) {
  const auto kernel = tile_kernel<In, kKind, kRows, kMoments>;
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

// The search takes a third of a microsecond; a model asks for the same few shapes again and again.
NormTilesPolicy policy_of(const TensorView& x) {
  struct Key {
    int64_t rows = 0, cols = 0, element_size = 0;
    const DeviceLimits* device = nullptr;
    bool operator==(const Key&) const = default;
  };
  thread_local std::array<std::pair<Key, NormTilesPolicy>, 8> cache{};
  const Key key{x.rows(), x.cols(), size_of(x.dtype), &device_limits(x.device)};
  auto& [known, policy] = cache[static_cast<size_t>(key.rows + key.cols / 8) % cache.size()];
  if (known != key) {
    policy = norm_tiles_policy(key.rows, key.cols, key.element_size, *key.device);
    known = key;
  }
  return policy;
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
