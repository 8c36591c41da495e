// Norm forward to FP8, row-wise and transposed, in one pass. Transposed stores want many rows, sums
// want whole rows, and both together exceed one multiprocessor: a cluster of blocks shares the
// tile. What each warp does stands in device/norm_tiles.cuh.
#include "cuda/device/norm_tiles.cuh"

#include "cuda/device/dependent_launch.cuh"
#include "cuda/norm.h"

namespace te::cuda {
namespace {

using norm_tiles::kThreads;
using norm_tiles::kUnitCols;
using norm_tiles::kUnitRows;
using norm_tiles::kWarps;
using norm_tiles::Problem;
using norm_tiles::Worker;

constexpr const char* kOp = "norm_forward";

template <class In, NormKind kKind, int kRows, bool kMoments>
__global__ void __launch_bounds__(kThreads, kMoments ? 2 : blocks_sharing(4, 3, kThreads))
    tile_kernel(const __grid_constant__ Problem p) {
  follow_previous_kernel();
  extern __shared__ __align__(128) uint8_t memory[];
  __shared__ uint64_t barriers[kWarps];
  __shared__ float2 row_statistics[kWarps][kUnitRows];
  __shared__ float amaxes[kWarps];
  [[maybe_unused]] __shared__ TileMoments<kWarps> moments;
  auto* parts = reinterpret_cast<float4*>(memory + p.steps * kStepElements * sizeof(In));
  const int warp = static_cast<int>(threadIdx.x) / 32;
  const Worker<In, kKind, kRows> worker(p, memory, parts, row_statistics[warp]);
  cluster_arrive_relaxed();  // this block runs: its shared memory may be written to
  worker.start_loads(&barriers[warp]);
  const float scale = p.fp8.scale_used(blockIdx.x == 0 && threadIdx.x == 0);
  wait_barrier(&barriers[warp], 0);
  cluster_wait();
  worker.send_parts();
  cluster_arrive();
  cluster_wait();
  worker.merge_parts();
  GatheredMoments<In, kMoments> gathered;
  const float amax = warp_reduce(worker.write_results(scale, gathered), Max{});
  if constexpr (kMoments) {
    if (p.moments) moments.leave(worker.moments(gathered));
  } else {
    if (!p.fp8.amax) return;
  }
  if (threadIdx.x % 32 == 0) amaxes[warp] = amax;
  __syncthreads();
  if constexpr (kMoments) {
    if (warp == kWarps - 1 && p.moments) moments.finish(p.moments, static_cast<int>(blockIdx.x));
  }
  if (threadIdx.x != 0 || !p.fp8.amax) return;
  float block_amax = amax;
  for (int i = 1; i < kWarps; ++i) block_amax = fmaxf(block_amax, amaxes[i]);
  atomic_max(p.fp8.amax, block_amax);
}

template <class In, NormKind kKind, int kRows, bool kMoments>
void launch(const Problem& p, int64_t tiles, Device device, cudaStream_t stream) {
  constexpr size_t kColumnWarps = kWarps * kUnitRows / kRows;
  const auto kernel = tile_kernel<In, kKind, kRows, kMoments>;
  static OncePerDevice once;
  once(device, [&] { allow_shared_memory(reinterpret_cast<const void*>(kernel), device, kOp); });
  LaunchAttributes attributes(device_limits(device), p.cluster);
  cudaLaunchConfig_t config{};
  config.gridDim = dim3(static_cast<unsigned>(tiles * p.cluster));
  config.blockDim = dim3(kThreads);
  config.dynamicSmemBytes = static_cast<size_t>(p.steps) * kStepElements * sizeof(In) +
                            kRows * static_cast<size_t>(p.cluster) * kColumnWarps * sizeof(float4);
  config.stream = stream;
  attributes.add_to(config);
  check(cudaLaunchKernelEx(&config, kernel, p), kOp);
}

NormTilesPolicy policy_of(const TensorView& x) {
  return norm_tiles_policy(x.rows(), x.cols(), size_of(x.dtype), device_limits(x.device));
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
  const bool moments = args.moments && norm_tiles_take_moments(args.x);
  const Problem p{.x = args.x.data,
                  .gamma = args.gamma.data,
                  .beta = args.beta.data,
                  .gamma_dtype = args.gamma.dtype,
                  .gamma_offset = args.zero_centered ? 1.0f : 0.0f,
                  .epsilon = args.epsilon,
                  .rows = args.x.rows(),
                  .cols = static_cast<int>(args.x.cols()),
                  .steps = policy.steps,
                  .cluster = policy.cluster,
                  .y = args.y.data,
                  .e5m2 = args.quantized.dtype == DType::Float8E5M2,
                  .fp8 = sink_of(args.quantized),
                  .mean = args.mean.ptr<float>(),
                  .rstd = args.rstd.ptr<float>(),
                  .moments = tile_moments_sink_of(moments ? args.moments : MomentsSink{},
                                                  tiles * policy.cluster, args.x.numel())};
  dispatch_high_precision(args.x.dtype, kOp, [&](auto tag) {
    dispatch_bool(args.kind == NormKind::LayerNorm, [&](auto layer) {
      using In = typename decltype(tag)::type;
      constexpr auto kKind = layer() ? NormKind::LayerNorm : NormKind::RMSNorm;
      dispatch_moments<In, true>(moments, [&](auto takes) {
        if (policy.rows == 64)
          launch<In, kKind, 64, takes()>(p, tiles, args.x.device, stream);
        else
          launch<In, kKind, 32, takes()>(p, tiles, args.x.device, stream);
      });
    });
  });
  return true;
}

}  // namespace te::cuda
