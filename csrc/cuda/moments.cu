// Moments of a tensor, in one pass by a grid that fills the GPU once. The last block to finish
// merges the results of all blocks into the row. A warp first sums 16-bit values with tensor cores
// (packed_moments.cuh). If this is not accurate enough, it reads its values again and sums them in
// fp32 about a pivot (octet_moments.cuh; fp32 values begin here), and if needed a third time, in
// fp64.
#include "ops/moments.h"

#include "cuda/device/dependent_launch.cuh"
#include "cuda/device/merge_rows.cuh"
#include "cuda/device/moment_fields.cuh"
#include "cuda/device/octet_moments.cuh"
#include "cuda/device/packed_moments.cuh"
#include "cuda/device/reduce.cuh"
#include "cuda/device/tensor_walk.cuh"

namespace te::cuda {
namespace {

// Summing with tensor cores needs more registers per thread, so fewer threads fit.
template <class In>
using MomentsWalk = OctetWalk<In, std::is_same_v<In, Half>       ? 256
                                  : std::is_same_v<In, BFloat16> ? 320
                                                                 : 384>;

template <class In>
struct MomentsStream {
  const In* x;
  MomentsWalk<In> walk;
  RowSink<Moments> out;

  __device__ __forceinline__ double value(int64_t i) const {
    return static_cast<double>(static_cast<float>(x[i]));
  }
};

__device__ __forceinline__ float warp_mean(float value, bool counts) {
  const int values = __popc(__ballot_sync(0xffffffffu, counts));
  return warp_reduce(counts ? value : 0.0f, Sum()) / static_cast<float>(max(1, values));
}

// The mean of the first elements of the warp's lanes, without those that are far from the mean of
// all: one outlier would move the mean many standard deviations away from the other elements.
template <class In>
__device__ __forceinline__ float sample_mean(const MomentsStream<In>& args) {
  const int64_t i = args.walk.first_element();
  const bool exists = i < args.walk.count;
  const float sample = exists ? static_cast<float>(args.x[i]) : 0.0f;
  const float distance = fabsf(sample - warp_mean(sample, exists));
  const bool is_near = distance <= 2.0f * warp_mean(distance, exists);
  return warp_mean(sample, exists && is_near);
}

// Returns the sums of the warp's octets. begin(gathered) is called once the first loads are issued.
template <class Gathered, class In, class Begin>
__device__ __forceinline__ MomentSums gather(const MomentsStream<In>& args, Begin&& begin) {
  Gathered gathered;
  args.walk.template stream<Octet<In>>(
      [&](int64_t octet, Octet<In>& slot) { slot = load_octet(args.x + 8 * octet); },
      [&] { begin(gathered); },
      [&](const Octet<In>& octet, int k, int64_t) {
        gathered.add(octet);
        if (k + 1 == Gathered::kLongest && k + 1 < args.walk.kInFlight) gathered.fold();
      },
      [&] { gathered.fold(); });
  return gathered.warp_sums();
}

// The same sums, taken in fp64 throughout.
template <class In>
__device__ __forceinline__ MomentSums exact_sums(const MomentsStream<In>& args, double pivot) {
  MomentSums sums = MomentSums::empty();
  args.walk.for_each([&](int64_t octet) {
    const auto x = load_octet(args.x + 8 * octet);
#pragma unroll
    for (int i = 0; i < 8; ++i) sums.add(static_cast<double>(x[i]), pivot);
  });
  return warp_add(sums);
}

// Sums the warp's octets. Returns the pivot from which deviations are taken.
template <class In>
__device__ __forceinline__ double sums_of_octets(const MomentsStream<In>& args, MomentSums& sums) {
  if constexpr (sizeof(In) == 2) {
    sums = gather<PackedMoments<In>>(args, [](auto&) {});
    if (PackedMoments<In>::is_exact(sums)) return 0;
  }
  float pivot = 0;
  sums = gather<OctetMoments<In>>(args, [&](auto& gathered) {
    pivot = sample_mean(args);
    gathered.set_pivot(pivot);
  });
  if (OctetMoments<In>::is_exact(sums)) return pivot_from(pivot);
  const double mean = pivot_from(pivot + sums.first / sums.count);
  sums = exact_sums(args, mean);
  return mean;
}

template <class In>
__global__ void __launch_bounds__(MomentsWalk<In>::kThreads,
                                  MomentsWalk<In>::kBlocksPerMultiprocessor)
    moments_kernel(const MomentsStream<In> args) {
  follow_previous_kernel();
  if (args.out.is_idle()) return;
  // The pivot of the whole grid. Because it is an element, squared deviations from it sum to at
  // most about count times those from the mean: fp64 loses no more digits than count has.
  const float origin = args.walk.count > 0 ? static_cast<float>(args.x[0]) : 0;
  MomentSums sums;
  const double pivot = sums_of_octets(args, sums);
  sums.shift(pivot - pivot_from(origin));
  if (args.walk.has_rest()) {
    MomentSums rest = MomentSums::empty();
    args.walk.for_rest([&](int64_t i) { rest.add(args.value(i), pivot_from(origin)); });
    sums.add(warp_add(rest));
  }
  constexpr int kSums = kMomentFieldsThatAdd;
  const MomentFields fields(sums);
  merge_grid<MomentsWalk<In>::kWarps, kSums>(
      fields.at, args.out, [&](const double* total, Moments& row) {
        const MomentSums all = sums_from(total, static_cast<double>(args.walk.count));
        merge(row, all.about(pivot_from(origin)));
      });
}

// One thread for each slot.
__global__ void merge_rows_kernel(const double* rows, int64_t count, const RowKind* kinds,
                                  double* into, int64_t slots, const int* active) {
  follow_previous_kernel();
  const int64_t slot = int64_t{blockIdx.x} * blockDim.x + threadIdx.x;
  if (slot >= slots || (active && *active == 0)) return;
  for (int64_t n = 0; n < count; ++n)
    merge(kinds[slot], into + slot * kRowFields, rows + (n * slots + slot) * kRowFields);
}

}  // namespace

void moments(const MomentsArgs& args, Stream stream) {
  const TensorView& x = args.x;
  const DeviceGuard guard(x.device);
  dispatch_high_precision(x.dtype, "moments", [&](auto tag) {
    using In = typename decltype(tag)::type;
    const MomentsWalk<In> walk(x.numel(), is_aligned(x.data, 16), x.device);
    launch_dependent(moments_kernel<In>, walk.blocks, walk.kThreads, 0, stream_of(stream),
                     MomentsStream<In>{x.ptr<In>(), walk, row_sink_of<Moments>(args.out)});
  });
}

void merge_rows(const MergeRowsArgs& args, Stream stream) {
  constexpr unsigned kThreads = 32;
  const int64_t slots = args.into.size(0);
  if (slots == 0) return;
  const DeviceGuard guard(args.into.device);
  launch_dependent(merge_rows_kernel, static_cast<unsigned>(ceil_div(slots, kThreads)), kThreads, 0,
                   stream_of(stream), args.rows.ptr<const double>(), args.rows.size(0),
                   args.kinds.ptr<const RowKind>(), args.into.ptr<double>(), slots,
                   args.active.ptr<const int>());
}

}  // namespace te::cuda
