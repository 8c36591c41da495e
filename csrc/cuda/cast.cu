// A cast between high-precision dtypes, with an optional factor. Threads handle packs of elements,
// which take 16 bytes of the wider dtype, and each loads all of its packs before it uses the first.
// Elements beyond the last whole pack are cast one by one, and so are all elements if memory is not
// aligned for packs.
#include "ops/cast.h"

#include <algorithm>

#include "cuda/device/dependent_launch.cuh"
#include "cuda/device/pack_io.cuh"

namespace te::cuda {
namespace {

constexpr int kThreads = 256;
constexpr int kInFlight = 4;

template <class In, class Out>
inline constexpr int kElements = 16 / static_cast<int>(std::max(sizeof(In), sizeof(Out)));

template <class In, class Out>
struct Cast {
  const In* x;
  Out* y;
  int64_t count;
  int64_t packs;  // packs that are read and written whole
  const float* factor;
};

template <class In, class Out>
__global__ void __launch_bounds__(kThreads) cast_kernel(const Cast<In, Out> args) {
  follow_previous_kernel();
  constexpr int V = kElements<In, Out>;
  const int64_t first = int64_t{blockIdx.x} * kThreads * kInFlight + threadIdx.x;
  const float factor = args.factor == nullptr ? 1.0f : *args.factor;
  Pack<In, V> packs[kInFlight];
#pragma unroll
  for (int k = 0; k < kInFlight; ++k)
    if (const int64_t pack = first + k * kThreads; pack < args.packs)
      packs[k] = load_pack_here<In, V>(args.x + pack * V);
#pragma unroll
  for (int k = 0; k < kInFlight; ++k) {
    const int64_t pack = first + k * kThreads;
    if (pack >= args.packs) break;
    float values[V];
    widen(packs[k], values);
#pragma unroll
    for (float& value : values) value *= factor;
    store_pack_global(args.y + pack * V, narrow<Out, V>(values));
  }
  const int64_t stride = int64_t{gridDim.x} * kThreads;
  for (int64_t i = args.packs * V + int64_t{blockIdx.x} * kThreads + threadIdx.x; i < args.count;
       i += stride)
    args.y[i] = Out(factor * static_cast<float>(args.x[i]));
}

template <class In, class Out>
void launch(const CastArgs& args, cudaStream_t stream) {
  constexpr int V = kElements<In, Out>;
  const int64_t count = args.x.numel();
  const bool wide =
      is_aligned(args.x.data, V * sizeof(In)) && is_aligned(args.y.data, V * sizeof(Out));
  const int64_t blocks = ceil_div(count, int64_t{kThreads} * kInFlight * V);
  launch_dependent(cast_kernel<In, Out>, static_cast<unsigned>(blocks), kThreads, 0, stream,
                   Cast<In, Out>{.x = args.x.ptr<In>(),
                                 .y = args.y.ptr<Out>(),
                                 .count = count,
                                 .packs = wide ? count / V : 0,
                                 .factor = args.factor.ptr<float>()});
}

}  // namespace

void cast(const CastArgs& args, Stream stream) {
  const DeviceGuard guard(args.x.device);
  dispatch_high_precision(args.x.dtype, "cast", [&](auto in) {
    dispatch_high_precision(args.y.dtype, "cast", [&](auto out) {
      launch<typename decltype(in)::type, typename decltype(out)::type>(args, stream_of(stream));
    });
  });
}

}  // namespace te::cuda
