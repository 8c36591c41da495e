// One pass over the tensor by a grid that fills the chip once. The last block to finish merges what
// all blocks have found into the row.
#include "ops/moments.h"

#include "cuda/device/merge_rows.cuh"
#include "cuda/device/octet_moments.cuh"
#include "cuda/device/octet_walk.cuh"
#include "cuda/device/reduce.cuh"

namespace te::cuda {
namespace {

template <class In>
struct MomentsStream {
  const In* x;
  OctetWalk<In> walk;
  RowSink<Moments> out;

  using Batch = Octet<In>[OctetWalk<In>::kInFlight];

  __device__ __forceinline__ void load(int64_t at, Batch& batch) const {
    walk.for_batch(at, [&](int k, int64_t octet) { batch[k] = load_octet(x + 8 * octet); });
  }
};

__device__ __forceinline__ float warp_mean(float value, bool counts) {
  const int values = __popc(__ballot_sync(0xffffffffu, counts));
  return warp_reduce(counts ? value : 0.0f, Sum()) / static_cast<float>(max(1, values));
}

// The mean of the first elements of the warp's threads, of those that are near it: one outlier
// among the samples would put it many deviations away from all others.
template <class In>
__device__ __forceinline__ float sample_mean(const MomentsStream<In>& args) {
  const int64_t i = args.walk.octets > 0 ? 8 * args.walk.first() : args.walk.first_of_rest();
  const bool exists = i < args.walk.count;
  const float sample = exists ? static_cast<float>(args.x[i]) : 0.0f;
  const float distance = fabsf(sample - warp_mean(sample, exists));
  const bool is_near = distance <= 2.0f * warp_mean(distance, exists);
  return warp_mean(sample, exists && is_near);
}

// Of the thread's octets, about the pivot that it returns. While a batch is added, the next one is
// on its way.
template <class In>
__device__ __forceinline__ float sums_of_octets(const MomentsStream<In>& args, MomentSums& sums) {
  typename MomentsStream<In>::Batch even, odd;
  int64_t at = args.walk.first();
  args.load(at, even);
  const float pivot = sample_mean(args);
  OctetMoments<In> gathered(pivot);
  const auto add = [&](auto& batch, auto& next) {
    args.load(at + args.walk.step(), next);
    args.walk.for_batch(at, [&](int k, int64_t) { gathered.add(batch[k]); });
    gathered.fold();
    at += args.walk.step();
  };
  while (at < args.walk.octets) {
    add(even, odd);
    if (at < args.walk.octets) add(odd, even);
  }
  sums = gathered.sums();
  return pivot;
}

// The same in fp64 throughout.
template <class In>
__device__ __forceinline__ MomentSums exact_sums_of_octets(const MomentsStream<In>& args,
                                                           double pivot) {
  MomentSums sums = MomentSums::empty();
#pragma unroll 1
  for (int64_t at = args.walk.first(); at < args.walk.octets; at += args.walk.step()) {
#pragma unroll 1
    for (int k = 0; k < OctetWalk<In>::kInFlight; ++k)
      args.walk.template for_batch<1>(at + k * OctetWalk<In>::kThreads, [&](int, int64_t octet) {
        const auto x = load_octet(args.x + 8 * octet);
#pragma unroll
        for (int i = 0; i < 8; ++i) sums.add(static_cast<double>(x[i]), pivot);
      });
  }
  return sums;
}

template <class In>
__device__ __forceinline__ Moments moments_of_warp(const MomentsStream<In>& args) {
  MomentSums sums;
  double pivot = sums_of_octets(args, sums);
  sums = warp_add(sums);
  if (!OctetMoments<In>::is_exact(sums)) {
    pivot = pivot_from(pivot + sums.first / sums.count);
    sums = warp_add(exact_sums_of_octets(args, pivot));
  }
  pivot = pivot_from(pivot);
  if (args.walk.has_rest()) {
    MomentSums rest = MomentSums::empty();
    args.walk.for_rest(
        [&](int64_t i) { rest.add(static_cast<double>(static_cast<float>(args.x[i])), pivot); });
    sums.add(warp_add(rest));
  }
  return sums.about(pivot);
}

template <class In>
__global__ void __launch_bounds__(OctetWalk<In>::kThreads, OctetWalk<In>::kBlocksPerMultiprocessor)
    moments_kernel(const MomentsStream<In> args) {
  if (args.out.is_idle()) return;
  merge_grid<OctetWalk<In>::kWarps>(moments_of_warp(args), args.out);
}

}  // namespace

void moments(const MomentsArgs& args, Stream stream) {
  const TensorView& x = args.x;
  const DeviceGuard guard(x.device);
  dispatch_high_precision(x.dtype, "moments", [&](auto tag) {
    using In = typename decltype(tag)::type;
    const OctetWalk<In> walk(x.numel(), is_aligned(x.data, 16));
    moments_kernel<In><<<walk.blocks(x.device), walk.kThreads, 0, stream_of(stream)>>>(
        {x.ptr<In>(), walk, row_sink_of<Moments>(args.out)});
  });
  check_launch("moments");
}

}  // namespace te::cuda
