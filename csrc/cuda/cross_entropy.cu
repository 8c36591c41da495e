// Cross entropy kernels. A block takes a row. The forward reads it once: its sum of exponentials is
// relative to the largest value so far, and is rescaled when a larger value comes (online softmax).
// The backward reads and writes each element once.
#include "ops/cross_entropy.h"

#include "cuda/cross_entropy_codes.h"
#include "cuda/device/dependent_launch.cuh"
#include "cuda/device/exponential.cuh"
#include "cuda/device/pack_io.cuh"
#include "cuda/device/reduce.cuh"

namespace te::cuda {
namespace {

constexpr int kThreads = 512;  // four blocks a multiprocessor: enough loads in flight
constexpr int kWarps = kThreads / 32;
constexpr int kPacks = 2;  // packs of a thread in each round

// ---- Forward ------------------------------------------------------------------------------------

// Some values of a row: the largest, the sum of exponentials relative to it, the sum of values.
struct Part {
  float largest = minus_infinity(), total = 0.0f, spread = 0.0f;

  template <int V>
  __device__ __forceinline__ void add(const float (&values)[V]) {
    const float before = largest;
#pragma unroll
    for (int k = 0; k < V; ++k) {
      largest = fmaxf(largest, values[k]);
      spread += values[k];
    }
    const float shift = shift_of(largest);
    total *= fast_exp(before - shift);
#pragma unroll
    for (int k = 0; k < V; ++k) total += fast_exp(values[k] - shift);
  }
};

template <class T, int V>
__global__ void __launch_bounds__(kThreads)
    cross_entropy_forward_kernel(const T* logits, const int* labels, float* sums, int64_t rows,
                                 int classes) {
  follow_previous_kernel();
  __shared__ float maxima[kWarps], totals[kWarps], spreads[kWarps];
  const int64_t row = blockIdx.x;
  const T* x = logits + row * classes;
  Part part;
  float values[V];
  for (int round = static_cast<int>(threadIdx.x) * V; round < classes;
       round += kPacks * kThreads * V) {
    Pack<T, V> raw[kPacks];
#pragma unroll
    for (int p = 0; p < kPacks; ++p)
      if (round + p * kThreads * V < classes)
        raw[p] = load_pack_here<T, V>(x + round + p * kThreads * V);
#pragma unroll
    for (int p = 0; p < kPacks; ++p) {
      if (round + p * kThreads * V >= classes) continue;
      widen(raw[p], values);
      part.add(values);
    }
  }
  const float largest = block_reduce(part.largest, Max{}, minus_infinity(), maxima);
  const float shift = shift_of(largest);
  part.total *= fast_exp(part.largest - shift);
  const float total = block_reduce(part.total, Sum{}, 0.0f, totals);
  const float spread = block_reduce(part.spread, Sum{}, 0.0f, spreads);
  if (threadIdx.x != 0) return;
  const int label = labels[row];
  sums[row] = largest;
  sums[rows + row] = total;
  sums[2 * rows + row] = label == kIgnored               ? 0.0f
                         : label >= 0 && label < classes ? static_cast<float>(x[label]) - shift
                                                         : __int_as_float(0x7fffffff);
  sums[3 * rows + row] = spread - static_cast<float>(classes) * shift;
}

// ---- Backward -----------------------------------------------------------------------------------

template <class T, int V>
__global__ void __launch_bounds__(kThreads)
    cross_entropy_backward_kernel(const T* logits, const int* labels, const float* log_sums,
                                  const float* factors, float smoothing, float evenly, T* dx,
                                  int classes) {
  follow_previous_kernel();
  // Rows are taken from the end, which the forward has read last: its rows are still in L2.
  const int64_t row = gridDim.x - 1 - blockIdx.x, start = row * classes;
  const int label = labels[row];
  const float log_sum = log_sums[row], factor = factors == nullptr ? 1.0f : factors[row];
  float values[V];
  for (int round = static_cast<int>(threadIdx.x) * V; round < classes;
       round += kPacks * kThreads * V) {
    Pack<T, V> raw[kPacks];
#pragma unroll
    for (int p = 0; p < kPacks; ++p)
      if (round + p * kThreads * V < classes && label != kIgnored)
        raw[p] = load_pack_here<T, V>(logits + start + round + p * kThreads * V);
#pragma unroll
    for (int p = 0; p < kPacks; ++p) {
      const int column = round + p * kThreads * V;
      if (column >= classes) continue;
      widen(raw[p], values);
#pragma unroll
      for (int k = 0; k < V; ++k) {
        values[k] = fast_exp(values[k] - log_sum) - evenly;
        if (column + k == label) values[k] -= 1.0f - smoothing;
        values[k] = label == kIgnored ? 0.0f : factor * values[k];
      }
      store_pack_global(dx + start + column, narrow<T, V>(values));
    }
  }
}

// ---- Launch -------------------------------------------------------------------------------------

bool rows_are_aligned(const TensorView& t) {
  return is_aligned(t.data, 16) && t.cols() * size_of(t.dtype) % 16 == 0;
}

// Columns are counted in 32 bits, with room for a last round past the end.
void require_few_classes(const TensorView& logits, std::string_view op) {
  require(logits.cols() <= (1 << 30), Kind::Unsupported, op, "expected at most 2^30 classes, got ",
          logits.cols());
}

// Calls f(Tag of T, elements of an access).
template <class F>
void dispatch(const TensorView& logits, bool aligned, std::string_view op, F&& f) {
  dispatch_high_precision(logits.dtype, op, [&](auto tag) {
    constexpr std::integral_constant<int, 16 / sizeof(typename decltype(tag)::type)> wide;
    constexpr std::integral_constant<int, 1> one;
    return aligned ? f(tag, wide) : f(tag, one);
  });
}

}  // namespace

void cross_entropy_forward(const CrossEntropyForwardArgs& args, Stream stream) {
  constexpr const char* kOp = "cross_entropy_forward";
  const TensorView& logits = args.logits;
  require_few_classes(logits, kOp);
  const DeviceGuard guard(logits.device);
  const int64_t rows = logits.rows();
  dispatch(logits, rows_are_aligned(logits), kOp, [&](auto tag, auto v) {
    using T = typename decltype(tag)::type;
    launch_dependent(cross_entropy_forward_kernel<T, decltype(v)::value>,
                     static_cast<unsigned>(rows), kThreads, 0, stream_of(stream), logits.ptr<T>(),
                     args.labels.ptr<int>(), args.sums.ptr<float>(), rows,
                     static_cast<int>(logits.cols()));
  });
}

void cross_entropy_backward(const CrossEntropyBackwardArgs& args, Stream stream) {
  constexpr const char* kOp = "cross_entropy_backward";
  if (args.codes) return cross_entropy_codes(args, stream);
  const TensorView& logits = args.logits;
  require_few_classes(logits, kOp);
  const DeviceGuard guard(logits.device);
  const bool aligned = rows_are_aligned(logits) && rows_are_aligned(args.dx);
  dispatch(logits, aligned, kOp, [&](auto tag, auto v) {
    using T = typename decltype(tag)::type;
    launch_dependent(cross_entropy_backward_kernel<T, decltype(v)::value>,
                     static_cast<unsigned>(logits.rows()), kThreads, 0, stream_of(stream),
                     logits.ptr<T>(), args.labels.ptr<int>(), args.log_sums.ptr<float>(),
                     args.factors.ptr<float>(), args.smoothing, args.evenly, args.dx.ptr<T>(),
                     static_cast<int>(logits.cols()));
  });
}

}  // namespace te::cuda
