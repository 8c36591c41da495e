// Softmax kernels. A row lives in the registers of one warp, or of one block where it is longer: it
// is read once and written once. Rows beyond that are read twice by a looping block. Keys outside a
// row's window are not read at all.
#include "ops/softmax.h"

#include "cuda/device/dependent_launch.cuh"
#include "cuda/device/exponential.cuh"
#include "cuda/device/pack_io.cuh"
#include "cuda/device/reduce.cuh"
#include "cuda/device/softmax_rows.cuh"
#include "cuda/policy/softmax.h"

namespace te::cuda {
namespace {

constexpr int kWarp = SoftmaxPolicy::kWarp;
constexpr int kMaxThreads = SoftmaxPolicy::kMaxThreads;

// ---- Arithmetic of one pack -------------------------------------------------------------------

// A row that sees no key has a sum of 0. Its inverse is 0 too, so that its weights are 0, not NaN.
__device__ __forceinline__ float inverse_of(float sum) {
  return sum == 0.0f ? 0.0f : __fdividef(1.0f, sum);
}

template <int V>
__device__ __forceinline__ bool touches(Span seen, int column) {
  return column < seen.end && column + V > seen.first;
}

// Scaled scores of a pack, -Inf where a key is not seen. Each is rounded before the largest is
// subtracted (no fused multiply-add), so that the difference of the largest itself is 0.
template <class T, int V>
__device__ __forceinline__ void score(const Pack<T, V>& raw, float scale, Span seen, int column,
                                      float (&scores)[V]) {
  widen(raw, scores);
#pragma unroll
  for (int k = 0; k < V; ++k) scores[k] = __fmul_rn(scores[k], scale);
  if (column >= seen.first && column + V <= seen.end) return;
#pragma unroll
  for (int k = 0; k < V; ++k)
    if (column + k < seen.first || column + k >= seen.end) scores[k] = minus_infinity();
}

template <int V>
__device__ __forceinline__ void hide(const HiddenKeys<V>& hidden, float (&scores)[V]) {
#pragma unroll
  for (int k = 0; k < V; ++k)
    if (hidden[k]) scores[k] = minus_infinity();
}

// Reduces over the threads of a row: a warp, or the whole block. Each `shared` serves one
// reduction.
template <class Op>
__device__ __forceinline__ float row_reduce(float value, Op op, float identity, float* shared) {
  if (blockDim.x == kWarp) return warp_reduce(value, op);
  return block_reduce(value, op, identity, shared);
}

// ---- Rows in registers: P packs of V values per thread ----------------------------------------

template <class T, int V, int P>
__global__ void __launch_bounds__(kMaxThreads)
    softmax_forward_kernel(const T* x, T* y, float scale, SoftmaxGeometry g) {
  follow_previous_kernel();
  __shared__ float maxima[kMaxThreads / kWarp], sums[kMaxThreads / kWarp];
  if (row_number() >= g.rows) return;  // a whole warp; blocks of one row never leave here
  const SoftmaxRow row = row_of(g);
  const auto column = [](int p) { return static_cast<int>((p * blockDim.x + threadIdx.x) * V); };
  x += row.index * g.keys;
  y += row.index * g.keys;

  Pack<T, V> raw[P];
#pragma unroll
  for (int p = 0; p < P; ++p)
    if (touches<V>(row.seen, column(p))) raw[p] = load_pack_here<T, V>(x + column(p));
  HiddenKeys<V> hidden[P];
  if (row.hidden != nullptr) {
#pragma unroll
    for (int p = 0; p < P; ++p)
      if (touches<V>(row.seen, column(p)))
        hidden[p] = load_hidden<V>(g.mask, row.hidden, column(p));
  }

  float value[P][V];
  float largest = minus_infinity();
#pragma unroll
  for (int p = 0; p < P; ++p) {
#pragma unroll
    for (int k = 0; k < V; ++k) value[p][k] = minus_infinity();
    if (!touches<V>(row.seen, column(p))) continue;
    score(raw[p], scale, row.seen, column(p), value[p]);
    if (row.hidden != nullptr) hide(hidden[p], value[p]);
#pragma unroll
    for (int k = 0; k < V; ++k) largest = fmaxf(largest, value[p][k]);
  }
  const float shift = shift_of(row_reduce(largest, Max{}, minus_infinity(), maxima));
  float sum = 0.0f;
#pragma unroll
  for (int p = 0; p < P; ++p)
#pragma unroll
    for (int k = 0; k < V; ++k) sum += value[p][k] = fast_exp(value[p][k] - shift);
  const float inverse = inverse_of(row_reduce(sum, Sum{}, 0.0f, sums));
#pragma unroll
  for (int p = 0; p < P; ++p) {
#pragma unroll
    for (int k = 0; k < V; ++k) value[p][k] *= inverse;
    if (column(p) < g.keys) store_pack_global(y + column(p), narrow<T, V>(value[p]));
  }
}

template <class T, int V, int P>
__global__ void __launch_bounds__(kMaxThreads)
    softmax_backward_kernel(const T* dy, const T* y, T* dx, float scale, int64_t rows, int keys) {
  follow_previous_kernel();
  __shared__ float sums[kMaxThreads / kWarp];
  const int64_t row = row_number();
  if (row >= rows) return;
  const auto column = [](int p) { return static_cast<int>((p * blockDim.x + threadIdx.x) * V); };
  dy += row * keys;
  y += row * keys;
  dx += row * keys;

  Pack<T, V> gradients[P], weights[P];
#pragma unroll
  for (int p = 0; p < P; ++p) {
    if (column(p) >= keys) continue;
    gradients[p] = load_pack_here<T, V>(dy + column(p));
    weights[p] = load_pack_here<T, V>(y + column(p));
  }
  float gradient[V], weight[V];
  float sum = 0.0f;
#pragma unroll
  for (int p = 0; p < P; ++p) {
    if (column(p) >= keys) continue;
    widen(gradients[p], gradient);
    widen(weights[p], weight);
#pragma unroll
    for (int k = 0; k < V; ++k) sum += gradient[k] * weight[k];
  }
  const float dot = row_reduce(sum, Sum{}, 0.0f, sums);
#pragma unroll
  for (int p = 0; p < P; ++p) {
    if (column(p) >= keys) continue;
    stay_packed(gradients[p]);
    stay_packed(weights[p]);
    widen(gradients[p], gradient);
    widen(weights[p], weight);
#pragma unroll
    for (int k = 0; k < V; ++k) gradient[k] = scale * weight[k] * (gradient[k] - dot);
    store_pack_global(dx + column(p), narrow<T, V>(gradient));
  }
}

// ---- Longer rows: a block reads its row twice -------------------------------------------------

// One pack of scores of a looping block.
template <class T, int V>
__device__ __forceinline__ void load_scores(const T* x, float scale, const SoftmaxMask& mask,
                                            const SoftmaxRow& row, int column, float (&scores)[V]) {
  score(load_pack<T, V>(x + column), scale, row.seen, column, scores);
  if (row.hidden != nullptr) hide(load_hidden<V>(mask, row.hidden, column), scores);
}

template <class T, int V>
__global__ void __launch_bounds__(kMaxThreads)
    softmax_forward_loop_kernel(const T* x, T* y, float scale, SoftmaxGeometry g) {
  follow_previous_kernel();
  __shared__ float maxima[kMaxThreads / kWarp], sums[kMaxThreads / kWarp];
  const SoftmaxRow row = row_of(g);
  x += row.index * g.keys;
  y += row.index * g.keys;
  const int first = static_cast<int>(threadIdx.x) * V, step = static_cast<int>(blockDim.x) * V;

  // The sum so far is relative to the largest score so far.
  float scores[V], largest = minus_infinity(), sum = 0.0f;
  for (int column = first; column < row.seen.end; column += step) {
    if (!touches<V>(row.seen, column)) continue;
    load_scores(x, scale, g.mask, row, column, scores);
    const float before = largest;
#pragma unroll
    for (int k = 0; k < V; ++k) largest = fmaxf(largest, scores[k]);
    const float shift = shift_of(largest);
    sum *= fast_exp(before - shift);
#pragma unroll
    for (int k = 0; k < V; ++k) sum += fast_exp(scores[k] - shift);
  }
  const float shift = shift_of(block_reduce(largest, Max{}, minus_infinity(), maxima));
  sum *= fast_exp(largest - shift);
  const float inverse = inverse_of(block_reduce(sum, Sum{}, 0.0f, sums));
  for (int column = first; column < g.keys; column += step) {
#pragma unroll
    for (int k = 0; k < V; ++k) scores[k] = minus_infinity();
    if (touches<V>(row.seen, column)) load_scores(x, scale, g.mask, row, column, scores);
#pragma unroll
    for (int k = 0; k < V; ++k) scores[k] = fast_exp(scores[k] - shift) * inverse;
    store_pack_global(y + column, narrow<T, V>(scores));
  }
}

template <class T, int V>
__global__ void __launch_bounds__(kMaxThreads)
    softmax_backward_loop_kernel(const T* dy, const T* y, T* dx, float scale, int keys) {
  follow_previous_kernel();
  __shared__ float sums[kMaxThreads / kWarp];
  const int64_t start = static_cast<int64_t>(blockIdx.x) * keys;
  const int first = static_cast<int>(threadIdx.x) * V, step = static_cast<int>(blockDim.x) * V;
  float gradient[V], weight[V], sum = 0.0f;
  for (int column = first; column < keys; column += step) {
    widen(load_pack<T, V>(dy + start + column), gradient);
    widen(load_pack<T, V>(y + start + column), weight);
#pragma unroll
    for (int k = 0; k < V; ++k) sum += gradient[k] * weight[k];
  }
  const float dot = block_reduce(sum, Sum{}, 0.0f, sums);
  for (int column = first; column < keys; column += step) {
    widen(load_pack<T, V>(dy + start + column), gradient);
    widen(load_pack<T, V>(y + start + column), weight);
#pragma unroll
    for (int k = 0; k < V; ++k) gradient[k] = scale * weight[k] * (gradient[k] - dot);
    store_pack_global(dx + start + column, narrow<T, V>(gradient));
  }
}

// ---- Launch -----------------------------------------------------------------------------------

bool rows_are_aligned(const TensorView& t) {
  return is_aligned(t.data, 16) && t.cols() * size_of(t.dtype) % 16 == 0;
}

struct Shape {
  dim3 blocks, threads;
};

Shape shape_of(const SoftmaxPolicy& policy, int64_t rows) {
  return {
      static_cast<unsigned>(policy.blocks(rows)),
      dim3(static_cast<unsigned>(policy.threads), static_cast<unsigned>(policy.rows_per_block()))};
}

// Columns are counted in 32 bits, with room for a last step past the end.
void require_few_keys(const TensorView& t, std::string_view op) {
  require(t.cols() <= (1 << 30), Kind::Unsupported, op, "expected at most 2^30 keys, got ",
          t.cols());
}

}  // namespace

void softmax_forward(const SoftmaxForwardArgs& args, Stream stream) {
  constexpr const char* kOp = "softmax_forward";
  const TensorView& x = args.x;
  require_few_keys(x, kOp);
  const DeviceGuard guard(x.device);
  const int elements = static_cast<int>(16 / size_of(x.dtype));
  const bool aligned = rows_are_aligned(x) && rows_are_aligned(args.y);
  const auto policy = SoftmaxPolicy::of(x.cols(), x.dtype, aligned);
  const SoftmaxGeometry g = geometry_of(args, aligned ? elements : 1);
  dispatch_softmax(policy, x.dtype, kOp, [&](auto tag, auto v, auto p) {
    using T = typename decltype(tag)::type;
    constexpr int V = decltype(v)::value, P = decltype(p)::value;
    const auto [blocks, threads] = shape_of(policy, g.rows);
    const auto launch = [&](auto* kernel) {
      launch_dependent(kernel, blocks, threads, 0, stream_of(stream), x.ptr<T>(), args.y.ptr<T>(),
                       args.scale, g);
    };
    if constexpr (P == 0)
      launch(softmax_forward_loop_kernel<T, V>);
    else
      launch(softmax_forward_kernel<T, V, P>);
  });
}

void softmax_backward(const SoftmaxBackwardArgs& args, Stream stream) {
  constexpr const char* kOp = "softmax_backward";
  const TensorView& dy = args.dy;
  require_few_keys(dy, kOp);
  const DeviceGuard guard(dy.device);
  const bool aligned =
      rows_are_aligned(dy) && rows_are_aligned(args.y) && rows_are_aligned(args.dx);
  const auto policy = SoftmaxPolicy::of(dy.cols(), dy.dtype, aligned);
  const int64_t rows = dy.rows();
  const int keys = static_cast<int>(dy.cols());
  dispatch_softmax(policy, dy.dtype, kOp, [&](auto tag, auto v, auto p) {
    using T = typename decltype(tag)::type;
    constexpr int V = decltype(v)::value, P = decltype(p)::value;
    const auto [blocks, threads] = shape_of(policy, rows);
    const auto launch = [&](auto* kernel, auto... counts) {
      launch_dependent(kernel, blocks, threads, 0, stream_of(stream), dy.ptr<T>(), args.y.ptr<T>(),
                       args.dx.ptr<T>(), args.scale, counts...);
    };
    if constexpr (P == 0)
      launch(softmax_backward_loop_kernel<T, V>, keys);
    else
      launch(softmax_backward_kernel<T, V, P>, rows, keys);
  });
}

}  // namespace te::cuda
