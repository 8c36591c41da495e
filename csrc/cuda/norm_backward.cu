// Norm backward: dx, and partial sums of dgamma and dbeta, in one pass over x and dy. The kernel is
// persistent: one block on each multiprocessor takes batch after batch of rows
// (device/norm_backward.cuh). The blocks of a cluster share wide rows, or rows of which there are
// few: this leaves fewer partial sums, and gives work to every multiprocessor.
#include "cuda/device/norm_backward.cuh"

#include "cuda/column_sum.h"
#include "cuda/launch.h"
#include "cuda/norm.h"
#include "cuda/policy/memoized.h"
#include "ops/column_sum.h"

namespace te::cuda {
namespace {

using norm_batches::Problem;
using norm_batches::Shared;
using norm_batches::Worker;

constexpr const char* kOp = "norm_backward";

struct Launch {
  Device device;
  cudaStream_t stream;
  int packs;
  dim3 block;
  size_t shared_bytes;
  int64_t max_clusters;
};

template <class In, class Gradient, NormKind kKind, int kPacks>
__global__ void __launch_bounds__(kBackwardThreads, 1)
    backward_kernel(const __grid_constant__ Problem p) {
  follow_previous_kernel();
  extern __shared__ __align__(128) uint8_t memory[];
  __shared__ Shared shared;
  Worker<In, Gradient, kKind, kPacks>(p, shared, memory).run();
}

// How many clusters the device holds, with one block on each multiprocessor. GPCs differ in size,
// so there may be fewer than multiprocessors / cluster.
template <class Kernel>
int resident_clusters(Kernel* kernel, const cudaLaunchConfig_t& config) {
  int clusters = 0;
  check(cudaOccupancyMaxActiveClusters(&clusters, kernel, &config), kOp);
  return clusters;
}

// Returns the number of clusters, each of which writes one row of partial sums.
template <class In, class Gradient, NormKind kKind, int kPacks>
int64_t launch(const Problem& p, const Launch& how) {
  static OncePerDevice once;
  static AskedOncePerDevice<kMaxCluster + 1> resident;
  const auto kernel = backward_kernel<In, Gradient, kKind, kPacks>;
  once(how.device,
       [&] { allow_shared_memory(reinterpret_cast<const void*>(kernel), how.device, kOp); });
  LaunchAttributes attributes(device_limits(how.device), p.cluster);
  cudaLaunchConfig_t config{};
  config.gridDim = dim3(static_cast<unsigned>(how.max_clusters * p.cluster));
  config.blockDim = how.block;
  config.stream = how.stream;
  attributes.add_to(config);
  int64_t clusters = how.max_clusters;
  if (p.cluster > 1) {
    config.dynamicSmemBytes = static_cast<size_t>(norm_backward_room(device_limits(how.device)));
    const auto ask = [&] { return resident_clusters(kernel, config); };
    clusters = std::min<int64_t>(clusters, resident(how.device, p.cluster, ask));
  }
  config.gridDim = dim3(static_cast<unsigned>(clusters * p.cluster));
  config.dynamicSmemBytes = how.shared_bytes;
  check(cudaLaunchKernelEx(&config, kernel, p), kOp);
  return clusters;
}

}  // namespace

bool norm_backward_rows(const NormBackwardArgs& args, cudaStream_t stream) {
  if (!NormBackwardProblem::fits(args)) return false;
  const int64_t rows = args.x.rows(), cols = args.x.cols();
  const int64_t x_bytes = size_of(args.x.dtype), dy_bytes = size_of(args.dy.dtype);
  const NormBackwardShape shape{.rows = rows,
                                .cols = cols,
                                .pack = NormBackwardProblem::pack(args),
                                .read_bytes = x_bytes * (args.residual_grad ? 2 : 1) + dy_bytes,
                                .write_bytes = x_bytes,
                                .max_parts = ceil_div(rows, kRowsPerColumnPart),
                                .device = device_limits(args.x.device)};
  const NormBackwardPolicy policy =
      memoized(shape, rows + cols / 8 + shape.read_bytes, norm_backward_policy);
  if (policy.cluster == 0) return false;
  Problem p{NormBackwardProblem(args)};
  p.cluster = policy.cluster;
  p.width = policy.width;
  p.stages = policy.stages;
  const auto stage_bytes = static_cast<size_t>(policy.groups * policy.width * shape.read_bytes);
  const Launch how{
      .device = args.x.device,
      .stream = stream,
      .packs = policy.packs,
      .block = dim3(static_cast<unsigned>(policy.threads), static_cast<unsigned>(policy.groups)),
      .shared_bytes = static_cast<size_t>(policy.stages) * stage_bytes +
                      static_cast<size_t>(policy.width) * sizeof(float),
      .max_clusters = norm_backward_clusters(shape, policy)};
  const int64_t parts = with_norm_backward_types(args, [&](auto x, auto dy, auto kind) {
    using In = typename decltype(x)::type;
    using Gradient = typename decltype(dy)::type;
    if (policy.packs == 4) return launch<In, Gradient, kind(), 4>(p, how);
    return launch<In, Gradient, kind(), 2>(p, how);
  });
  finish_column_sums(args.workspace, parts, 2 * cols, args.dgamma, args.dbeta, stream);
  return true;
}

}  // namespace te::cuda
