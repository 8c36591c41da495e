// Sums the parts of several ranks (ops/sum_parts.h). A thread makes one access to each part, with
// the loads of several parts in flight at once.
#include "ops/sum_parts.h"

#include "cuda/device/dependent_launch.cuh"
#include "cuda/device/divide.cuh"
#include "cuda/device/pack_io.cuh"

namespace te::cuda {
namespace {

constexpr int kThreads = 512;

// The blocks on a multiprocessor that keep memory busy: fewer if a thread loads more at once.
constexpr int blocks_of(int in_flight) { return in_flight == 1 ? 3 : 2; }

template <class T>
struct Parts {
  const T* own;
  const char* first;
  int64_t stride;
  int count;
  const T* bias;  // absent: nothing is added
  T* out;
  int64_t elements, cols;
};

template <class T, int V>
__device__ __forceinline__ void add(float (&values)[V], const Pack<T, V>& pack) {
  float more[V];
  widen(pack, more);
#pragma unroll
  for (int k = 0; k < V; ++k) values[k] += more[k];
}

// kInFlight: parts that a thread loads before it adds the first of them.
template <class T, int V, int kInFlight>
__global__ void __launch_bounds__(kThreads, blocks_of(kInFlight))
    sum_parts_kernel(const __grid_constant__ Parts<T> parts) {
  follow_previous_kernel();
  const int64_t i = (static_cast<int64_t>(blockIdx.x) * kThreads + threadIdx.x) * V;
  if (i >= parts.elements) return;
  const Pack<T, V> own = load_pack_here<T, V>(parts.own + i);
  float values[V];
  Pack<T, V> packs[kInFlight];
  for (int first = 0; first < parts.count; first += kInFlight) {
#pragma unroll
    for (int k = 0; k < kInFlight; ++k)
      if (first + k < parts.count)
        packs[k] = load_pack_here<T, V>(
            reinterpret_cast<const T*>(parts.first + (first + k) * parts.stride) + i);
    if (first == 0) widen(own, values);
#pragma unroll
    for (int k = 0; k < kInFlight; ++k)
      if (first + k < parts.count) add(values, packs[k]);
  }
  if (parts.bias)
    add(values, load_pack_here<T, V>(parts.bias + divide_by(i, parts.cols).remainder));
  store_pack_global(parts.out + i, narrow<T, V>(values));
}

template <class T, int V>
void launch(const Parts<T>& parts, cudaStream_t stream) {
  const auto blocks = static_cast<unsigned>(ceil_div(parts.elements, int64_t{V} * kThreads));
  const auto start = [&](auto kernel) {
    launch_dependent(kernel, blocks, kThreads, 0, stream, parts);
  };
  // A rank of two, four or eight receives 1, 3 or 7 parts. More parts are loaded in turns.
  if (parts.count == 1) return start(sum_parts_kernel<T, V, 1>);
  if (parts.count <= 3) return start(sum_parts_kernel<T, V, 3>);
  return start(sum_parts_kernel<T, V, 7>);
}

template <class T>
void run(const SumParts& sum, cudaStream_t stream) {
  constexpr int V = 16 / sizeof(T);
  const Parts<T> parts{.own = sum.own.ptr<T>(),
                       .first = sum.first,
                       .stride = sum.stride,
                       .count = sum.count,
                       .bias = sum.bias ? sum.bias.ptr<T>() : nullptr,
                       .out = sum.out.ptr<T>(),
                       .elements = sum.own.numel(),
                       .cols = sum.own.cols()};
  const bool wide = is_aligned(parts.own, 16) && is_aligned(parts.first, 16) &&
                    parts.stride % 16 == 0 && is_aligned(parts.bias, 16) &&
                    is_aligned(parts.out, 16) && parts.elements % V == 0 &&
                    (parts.bias == nullptr || parts.cols % V == 0);
  return wide ? launch<T, V>(parts, stream) : launch<T, 1>(parts, stream);
}

}  // namespace

void sum_parts(const SumParts& sum, Stream stream) {
  const DeviceGuard guard(sum.own.device);
  dispatch_high_precision(sum.own.dtype, "sum_parts", [&](auto tag) {
    run<typename decltype(tag)::type>(sum, stream_of(stream));
  });
}

}  // namespace te::cuda
