// The amaxes of many tensors, and the scales that follow from them, in few launches. Each tensor is
// read once, by blocks that fill the GPU at most once; the last block of a tensor to finish writes
// its scale. The lines that were read stay in L2 for the cast that follows.
#include "ops/amax.h"

#include <algorithm>

#include "cuda/device/dependent_launch.cuh"
#include "cuda/device/reduce.cuh"
#include "cuda/device/tensor_batch.cuh"
#include "cuda/device/vector.cuh"

namespace te::cuda {
namespace {

constexpr int kThreads = 256;
constexpr int kBlocksPerMultiprocessor = 8;
constexpr int kInFlight = 4;  // octets that a thread loads before it uses the first

struct Values {
  const void* x;
  int64_t count;
  int64_t octets;  // octets that are read whole; 0 if memory is not aligned for it
  unsigned blocks;
  CurrentScaleSink sink;
};

using Batch = TensorBatch<Values, kAmaxesAtOnce>;
static_assert(sizeof(Batch) <= 4096);  // arguments of a kernel

template <class In>
__device__ __forceinline__ float amax_of(const Octet<In>& x, float amax) {
#pragma unroll
  for (int i = 0; i < 8; ++i) amax = fmaxf(amax, fabsf(x[i]));
  return amax;
}

template <class In>
__global__ void __launch_bounds__(kThreads, blocks_sharing(kBlocksPerMultiprocessor, 5, kThreads))
    amax_kernel(const __grid_constant__ Batch batch) {
  follow_previous_kernel();
  __shared__ BlockAmax<kThreads / 32> block_amax;
  const int index = batch.tensor_of(blockIdx.x);
  const Values& args = batch.tensors[index];
  const auto* values = static_cast<const In*>(args.x);
  const unsigned thread = (blockIdx.x - batch.first_block[index]) * kThreads + threadIdx.x;
  const unsigned stride = args.blocks * kThreads;
  float amax = 0.0f;
  int64_t octet = thread;
  for (; octet + (kInFlight - 1) * stride < args.octets; octet += kInFlight * stride) {
    Octet<In> x[kInFlight];
#pragma unroll
    for (int k = 0; k < kInFlight; ++k) x[k] = load_octet(values + 8 * (octet + k * stride));
#pragma unroll
    for (int k = 0; k < kInFlight; ++k) amax = amax_of(x[k], amax);
  }
  for (; octet < args.octets; octet += stride) amax = amax_of(load_octet(values + 8 * octet), amax);
  for (int64_t i = 8 * args.octets + thread; i < args.count; i += stride)
    amax = fmaxf(amax, fabsf(static_cast<float>(values[i])));
  block_amax.leave(amax);
  __syncthreads();
  if (threadIdx.x == 0) args.sink.finish(block_amax.total(), args.blocks);
}

}  // namespace

void amax(std::span<const AmaxArgs> all, Stream stream) {
  const TensorView& like = all.front().x;
  const DeviceGuard guard(like.device);
  const int64_t most = int64_t{multiprocessors(like.device)} * kBlocksPerMultiprocessor;
  Batch batch;
  const auto launch = [&] {
    if (batch.size == 0) return;
    dispatch_high_precision(like.dtype, "amax", [&](auto in) {
      using In = typename decltype(in)::type;
      launch_dependent(amax_kernel<In>, batch.blocks, kThreads, 0, stream_of(stream), batch);
    });
    batch.clear();
  };
  for (const AmaxArgs& args : all) {
    const int64_t count = args.x.numel();
    const int64_t octets = is_aligned(args.x.data, 16) ? count / 8 : 0;
    const int64_t wanted = ceil_div(count, int64_t{8} * kThreads);
    const auto blocks = static_cast<unsigned>(std::clamp<int64_t>(wanted, 1, most));
    batch.add({args.x.data, count, octets, blocks, sink_of(args.scale)}, blocks);
    if (batch.is_full()) launch();
  }
  launch();
}

}  // namespace te::cuda
