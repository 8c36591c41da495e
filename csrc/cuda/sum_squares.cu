// Sums of squares of many tensors in few launches. A block reads kSumSquaresBlock elements of one
// tensor, with many loads in flight, and writes the sum of their squares.
#include "ops/sum_squares.h"

#include "cuda/device/dependent_launch.cuh"
#include "cuda/device/pack_io.cuh"
#include "cuda/device/reduce.cuh"
#include "cuda/device/tensor_batch.cuh"

namespace te::cuda {
namespace {

constexpr int kThreads = 256;
constexpr int kLoads = 8;  // loads of 16 bytes that a thread has in flight

struct Values {
  const void* data;
  int64_t count;
};

struct Batch {
  TensorBatch<Values, 192> values;
  float* sums;
};
static_assert(sizeof(Batch) <= 4096);

template <class T, int V>
__device__ __forceinline__ void add_squares(const Pack<T, V>& pack, float& sum) {
  float values[V];
  widen(pack, values);
#pragma unroll
  for (int k = 0; k < V; ++k) sum = fmaf(values[k], values[k], sum);
}

// The sum over `count` elements, a multiple of V.
template <class T, int V>
__device__ __forceinline__ float sum_of_packs(const T* x, int count) {
  float sum = 0.0f;
  for (int begin = threadIdx.x * V; begin < count; begin += kLoads * kThreads * V) {
    Pack<T, V> packs[kLoads];
#pragma unroll
    for (int i = 0; i < kLoads; ++i) {
      const int at = begin + i * kThreads * V;
      packs[i] = at < count ? load_pack<T, V>(x + at) : Pack<T, V>{};
    }
#pragma unroll
    for (int i = 0; i < kLoads; ++i) add_squares<T, V>(packs[i], sum);
  }
  return sum;
}

template <class T>
__global__ void __launch_bounds__(kThreads)
    sum_squares_kernel(const __grid_constant__ Batch batch) {
  follow_previous_kernel();
  const int index = batch.values.tensor_of(blockIdx.x);
  const Values& values = batch.values.tensors[index];
  const int64_t first = int64_t{blockIdx.x - batch.values.first_block[index]} * kSumSquaresBlock;
  const T* const x = static_cast<const T*>(values.data) + first;
  const int count = static_cast<int>(min(kSumSquaresBlock, values.count - first));
  constexpr int kWide = 16 / sizeof(T);
  const bool wide = reinterpret_cast<uintptr_t>(values.data) % 16 == 0 && count % kWide == 0;
  const float sum = wide ? sum_of_packs<T, kWide>(x, count) : sum_of_packs<T, 1>(x, count);
  __shared__ float parts[kThreads / 32];
  const float whole = block_reduce(sum, Sum{}, 0.0f, parts);
  if (threadIdx.x == 0) batch.sums[blockIdx.x] = whole;
}

}  // namespace

void sum_squares(const SumSquaresArgs& args, Stream stream) {
  const DeviceGuard guard(args.sums.device);
  Batch batch;
  batch.sums = args.sums.ptr<float>();
  DType dtype = DType::Float32;
  const auto launch = [&] {
    if (batch.values.blocks == 0) return;
    dispatch_high_precision(dtype, "sum_squares", [&](auto tag) {
      launch_dependent(sum_squares_kernel<typename decltype(tag)::type>, batch.values.blocks,
                       kThreads, 0, stream_of(stream), batch);
    });
    batch.sums += batch.values.blocks;
    batch.values.clear();
  };
  for (const TensorView& x : args.tensors) {
    if (batch.values.is_full() || x.dtype != dtype) launch();
    dtype = x.dtype;
    if (x.numel() > 0) batch.values.add({x.data, x.numel()}, sum_squares_blocks(x));
  }
  launch();
}

}  // namespace te::cuda
