// Norm forward to FP8, row-wise and transposed, in one pass. Transposed stores want many rows, sums
// want whole rows, and both together exceed one multiprocessor: a cluster of blocks shares the
// tile. What each warp does stands in device/norm_tiles.cuh.
#include "cuda/device/norm_tiles.cuh"

#include "cuda/launch.h"
#include "cuda/norm.h"

namespace te::cuda {
namespace {

using norm_tiles::kThreads;
using norm_tiles::kUnitRows;
using norm_tiles::kWarps;
using norm_tiles::Problem;
using norm_tiles::Worker;

constexpr const char* kOp = "norm_forward";

template <class In, NormKind kKind, int kRows>
__global__ void __launch_bounds__(kThreads, 3) tile_kernel(const __grid_constant__ Problem p) {
  extern __shared__ __align__(128) uint8_t memory[];
  __shared__ uint64_t barriers[kWarps];
  __shared__ float2 row_statistics[kWarps][kUnitRows];
  __shared__ float amaxes[kWarps];
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
  const float amax = warp_reduce(worker.write_results(scale), Max{});
  if (!p.fp8.amax) return;
  if (threadIdx.x % 32 == 0) amaxes[warp] = amax;
  __syncthreads();
  if (threadIdx.x != 0) return;
  float block_amax = amax;
  for (int i = 1; i < kWarps; ++i) block_amax = fmaxf(block_amax, amaxes[i]);
  atomic_max(p.fp8.amax, block_amax);
}

template <class In, NormKind kKind, int kRows>
void launch(const Problem& p, Device device, cudaStream_t stream) {
  constexpr size_t kMostBytes = 208 << 10;
  constexpr size_t kColumnWarps = kWarps * kUnitRows / kRows;
  const auto kernel = tile_kernel<In, kKind, kRows>;
  static OncePerDevice once;
  once(device, [&] { allow_shared_memory(kernel, kMostBytes, kOp); });
  cudaLaunchAttribute attribute{};
  attribute.id = cudaLaunchAttributeClusterDimension;
  attribute.val.clusterDim = {static_cast<unsigned>(p.cluster), 1, 1};
  cudaLaunchConfig_t config{};
  const int64_t tiles = std::max<int64_t>(ceil_div(p.rows, kRows), 1);
  config.gridDim = dim3(static_cast<unsigned>(tiles * p.cluster));
  config.blockDim = dim3(kThreads);
  config.dynamicSmemBytes = static_cast<size_t>(p.steps) * kStepElements * sizeof(In) +
                            kRows * static_cast<size_t>(p.cluster) * kColumnWarps * sizeof(float4);
  config.stream = stream;
  config.attrs = &attribute;
  config.numAttrs = 1;
  check(cudaLaunchKernelEx(&config, kernel, p), kOp);
}

bool fits(const NormForwardArgs& args) {
  if (!args.quantized || args.current || args.x.cols() % 8 != 0) return false;
  if (args.y && args.y.dtype != args.x.dtype) return false;
  for (const TensorView* t : {&args.x, &args.gamma, &args.beta, &args.y})
    if (!is_aligned(t->data, 16)) return false;
  return is_aligned(args.quantized.rowwise.data, 8);
}

}  // namespace

bool norm_forward_tiles(const NormForwardArgs& args, cudaStream_t stream) {
  if (!fits(args)) return false;
  const auto policy = norm_tiles_policy(args.x.rows(), args.x.cols(), size_of(args.x.dtype),
                                        multiprocessors(args.x.device));
  if (policy.rows == 0) return false;
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
                  .rstd = args.rstd.ptr<float>()};
  dispatch_high_precision(args.x.dtype, kOp, [&](auto tag) {
    dispatch_bool(args.kind == NormKind::LayerNorm, [&](auto layer) {
      using In = typename decltype(tag)::type;
      constexpr auto kKind = layer() ? NormKind::LayerNorm : NormKind::RMSNorm;
      if (policy.rows == 64)
        launch<In, kKind, 64>(p, args.x.device, stream);
      else
        launch<In, kKind, 32>(p, args.x.device, stream);
    });
  });
  return true;
}

}  // namespace te::cuda
