// Dropout kernels. A thread takes V neighbouring elements, which share a draw of random words. The
// forward, and a backward without a bias gradient, go through the tensor as one line. A backward
// with a bias gradient goes down the columns, so that its sums stay in registers.
#include "ops/dropout_add.h"

#include <algorithm>

#include "core/dropout.h"
#include "cuda/column_sum.h"
#include "cuda/device/dependent_launch.cuh"
#include "cuda/device/divide.cuh"
#include "cuda/device/pack_io.cuh"
#include "ops/column_sum.h"

namespace te::cuda {
namespace {

constexpr int kLineThreads = 512;
constexpr int kThreads = 256;  // down the columns
constexpr int kWarp = 32;
constexpr int kWarps = kThreads / kWarp;
constexpr int kRowsPerThread = 4;  // rows of a thread whose loads are in flight at once
constexpr int kBlocksPerMultiprocessor = 3;
constexpr int64_t kMostBlocksInY = 65535;

// Elements of a thread's access: 16 bytes of the wider type.
template <class In, class Out>
inline constexpr int kElements = 16 / std::max(sizeof(In), sizeof(Out));

// ---- Loads, stores and randomness of V elements -------------------------------------------------

// Loads V elements; if they are not aligned, one by one, and at most `left` of them.
template <bool kAligned, int V, class T>
__device__ __forceinline__ Pack<T, V> load(const T* from, int64_t left) {
  if constexpr (kAligned) {
    return load_pack_here<T, V>(from);
  } else {
    Pack<T, V> pack;
#pragma unroll
    for (int k = 0; k < V; ++k) pack.at[k] = k < left ? from[k] : T(0.0f);
    return pack;
  }
}

template <bool kAligned, int V, class T>
__device__ __forceinline__ void store(T* to, const float (&values)[V], int64_t left) {
  const Pack<T, V> pack = narrow<T, V>(values);
  if constexpr (kAligned) {
    store_pack_global(to, pack);
  } else {
#pragma unroll
    for (int k = 0; k < V; ++k)
      if (k < left) to[k] = pack.at[k];
  }
}

struct Randomness {
  const int64_t* seed;
  DropoutRule rule;

  __device__ __forceinline__ bool drops() const { return rule.threshold != 0; }
  __device__ __forceinline__ uint64_t key() const {
    return drops() ? static_cast<uint64_t>(__ldg(seed)) : 0;
  }
};

// The random words of N runs of V elements; each run uses a draw or a part of one. They do not
// depend on the elements, so they are computed while the loads of the elements are in flight, at no
// cost in time.
template <int N, int V>
struct Words {
  static_assert(kElementsPerDraw % V == 0);
  PhiloxWords drawn[N] = {};

  __device__ __forceinline__ void draw(const int64_t (&first)[N], uint64_t key) {
#pragma unroll
    for (int n = 0; n < N; ++n)
      drawn[n] = philox_counter(static_cast<uint64_t>(first[n]) / kElementsPerDraw);
    te::draw(drawn, key);
  }

  // Without a draw all words are 0, and the rule of p = 0 keeps the values as they are.
  __device__ __forceinline__ void drop(float (&values)[V], int n, int64_t first,
                                       DropoutRule rule) const {
    const int begin = static_cast<int>(static_cast<uint64_t>(first) % kElementsPerDraw) / V * V;
#pragma unroll
    for (int k = 0; k < V; ++k)
      values[k] = dropout(values[k], random_bits(drawn[n], begin + k), rule);
  }
};

// ---- Along the line -----------------------------------------------------------------------------

template <class In, class Out>
struct Line {
  const In* x;
  const In* bias;       // absent: nothing is added
  const Out* residual;  // likewise
  Out* out;
  int64_t count, cols;
};

template <bool kAligned, int V, class In>
__device__ __forceinline__ void add_bias(float (&values)[V], const In* bias, int64_t first,
                                         int64_t cols) {
  int64_t column = divide_by(first, cols).remainder;
  if constexpr (kAligned) {
    float addend[V];
    widen(load_pack<In, V>(bias + column), addend);
#pragma unroll
    for (int k = 0; k < V; ++k) values[k] = rounded_sum(values[k], addend[k]);
  } else {
#pragma unroll
    for (int k = 0; k < V; ++k) {
      values[k] = rounded_sum(values[k], static_cast<float>(bias[column]));
      if (++column == cols) column = 0;
    }
  }
}

// A thread makes one access and exits. Many small blocks, which go through memory close together,
// reach a higher bandwidth than blocks with several accesses per thread, and other warps hide the
// time of the random numbers.
template <class In, class Out, bool kAligned>
__global__ void __launch_bounds__(kLineThreads)
    line_kernel(Line<In, Out> line, Randomness randomness) {
  follow_previous_kernel();
  constexpr int V = kElements<In, Out>;
  const int64_t first[1] = {(static_cast<int64_t>(blockIdx.x) * kLineThreads + threadIdx.x) * V};
  const int64_t left = line.count - first[0];
  if (left <= 0) return;
  const uint64_t key = randomness.key();
  const Pack<In, V> x = load<kAligned, V>(line.x + first[0], left);
  Pack<Out, V> residual;
  if (line.residual) residual = load<kAligned, V>(line.residual + first[0], left);
  Words<1, V> words;
  if (randomness.drops()) words.draw(first, key);
  float values[V];
  widen(x, values);
  if (line.bias) add_bias<kAligned>(values, line.bias, first[0], line.cols);
  words.drop(values, 0, first[0], randomness.rule);
  if (line.residual) {
    float addend[V];
    widen(residual, addend);
#pragma unroll
    for (int k = 0; k < V; ++k) values[k] = rounded_sum(values[k], addend[k]);
  }
  store<kAligned>(line.out + first[0], values, left);
}

template <class In, class Out>
void launch_line(const Line<In, Out>& line, const Randomness& randomness, cudaStream_t stream) {
  constexpr int V = kElements<In, Out>;
  if (line.count == 0) return;
  const bool aligned =
      is_aligned(line.x, V * sizeof(In)) && is_aligned(line.bias, V * sizeof(In)) &&
      is_aligned(line.residual, V * sizeof(Out)) && is_aligned(line.out, V * sizeof(Out)) &&
      line.count % V == 0 && (line.bias == nullptr || line.cols % V == 0);
  const auto blocks = static_cast<unsigned>(ceil_div(line.count, int64_t{V} * kLineThreads));
  dispatch_bool(aligned, [&](auto wide) {
    launch_dependent(line_kernel<In, Out, wide()>, blocks, kLineThreads, 0, stream, line,
                     randomness);
  });
}

// ---- Down the columns ---------------------------------------------------------------------------

template <class In, class Out>
struct Columns {
  const In* dout;
  Out* dx;  // absent: only the sums are wanted
  float* partials;
  int64_t rows, cols, rows_per_part;
};

// Adds the sums of the block's warps, in order, into this part's row of the partial sums.
template <int V>
__device__ __forceinline__ void leave_part(const float (&sums)[V], float* partials, int64_t cols) {
  __shared__ float shared[kWarps][kWarp * V];
#pragma unroll
  for (int k = 0; k < V; ++k) shared[threadIdx.y][threadIdx.x * V + k] = sums[k];
  __syncthreads();
  const int thread = static_cast<int>(threadIdx.y * kWarp + threadIdx.x);
  const int64_t column = static_cast<int64_t>(blockIdx.x) * (kWarp * V) + thread;
  if (thread >= kWarp * V || column >= cols) return;
  float sum = shared[0][thread];
#pragma unroll
  for (int warp = 1; warp < kWarps; ++warp) sum += shared[warp][thread];
  partials[static_cast<int64_t>(blockIdx.y) * cols + column] = sum;
}

template <class In, class Out, int V>
__global__ void __launch_bounds__(kThreads, kBlocksPerMultiprocessor)
    columns_kernel(Columns<In, Out> c, Randomness randomness) {
  follow_previous_kernel();
  const uint64_t key = randomness.key();
  const int64_t column = (static_cast<int64_t>(blockIdx.x) * kWarp + threadIdx.x) * V;
  const int64_t begin = static_cast<int64_t>(blockIdx.y) * c.rows_per_part;
  const int64_t end = column < c.cols ? min(begin + c.rows_per_part, c.rows) : 0;
  float sums[V] = {};
  for (int64_t row = begin + threadIdx.y; row < end; row += kWarps * kRowsPerThread) {
    Pack<In, V> dout[kRowsPerThread];
#pragma unroll
    for (int u = 0; u < kRowsPerThread; ++u)
      if (row + u * kWarps < end)
        dout[u] = load_pack_here<In, V>(c.dout + (row + u * kWarps) * c.cols + column);
    int64_t first[kRowsPerThread];
#pragma unroll
    for (int u = 0; u < kRowsPerThread; ++u) first[u] = (row + u * kWarps) * c.cols + column;
    Words<kRowsPerThread, V> words;
    if (randomness.drops()) words.draw(first, key);
#pragma unroll
    for (int u = 0; u < kRowsPerThread; ++u) {
      if (row + u * kWarps >= end) break;
      float values[V];
      widen(dout[u], values);
      words.drop(values, u, first[u], randomness.rule);
#pragma unroll
      for (int k = 0; k < V; ++k) sums[k] += values[k];
      if (c.dx) store_pack_global(c.dx + first[u], narrow<Out, V>(values));
    }
  }
  leave_part(sums, c.partials, c.cols);
}

// Returns the number of parts.
template <int V, class In, class Out>
int64_t launch_columns(Columns<In, Out> c, const Randomness& randomness, Device device,
                       cudaStream_t stream) {
  // One wave of blocks: all parts run at the same time, and few partial sums are left to add.
  const int64_t tiles = ceil_div(c.cols, int64_t{kWarp} * V);
  const int64_t wave = int64_t{multiprocessors(device)} * kBlocksPerMultiprocessor;
  const int64_t most = std::min<int64_t>(ceil_div(c.rows, kRowsPerColumnPart), kMostBlocksInY);
  c.rows_per_part = ceil_div(c.rows, std::clamp<int64_t>(wave / tiles, 1, most));
  const int64_t parts = ceil_div(c.rows, c.rows_per_part);
  const dim3 blocks(static_cast<unsigned>(tiles), static_cast<unsigned>(parts));
  launch_dependent(columns_kernel<In, Out, V>, blocks, dim3(kWarp, kWarps), 0, stream, c,
                   randomness);
  return parts;
}

template <class In, class Out>
int64_t sum_columns(const Columns<In, Out>& c, const Randomness& randomness, Device device,
                    cudaStream_t stream) {
  constexpr int V = kElements<In, Out>;
  if (c.rows == 0 || c.cols == 0) return 0;
  if (is_aligned(c.dout, V * sizeof(In)) && is_aligned(c.dx, V * sizeof(Out)) && c.cols % V == 0)
    return launch_columns<V>(c, randomness, device, stream);
  return launch_columns<1>(c, randomness, device, stream);
}

// Calls f(Tag of In, Tag of Out).
template <class F>
void dispatch_pair(DType in, DType out, std::string_view op, F&& f) {
  dispatch_high_precision(in, op, [&](auto in_tag) {
    dispatch_high_precision(out, op, [&](auto out_tag) { f(in_tag, out_tag); });
  });
}

}  // namespace

void dropout_add_forward(const DropoutAddForwardArgs& args, Stream stream) {
  constexpr const char* kOp = "dropout_add_forward";
  const DeviceGuard guard(args.x.device);
  const Randomness randomness{args.seed.ptr<int64_t>(), dropout_rule(args.p)};
  dispatch_pair(args.x.dtype, args.out.dtype, kOp, [&](auto in, auto out) {
    using In = typename decltype(in)::type;
    using Out = typename decltype(out)::type;
    const Line<In, Out> line{args.x.ptr<In>(),    args.bias.ptr<In>(), args.residual.ptr<Out>(),
                             args.out.ptr<Out>(), args.x.numel(),      args.x.cols()};
    launch_line(line, randomness, stream_of(stream));
  });
}

void dropout_add_backward(const DropoutAddBackwardArgs& args, Stream stream) {
  constexpr const char* kOp = "dropout_add_backward";
  const TensorView& dout = args.dout;
  const DeviceGuard guard(dout.device);
  const Randomness randomness{args.seed.ptr<int64_t>(), dropout_rule(args.p)};
  const DType dx_dtype = args.dx ? args.dx.dtype : dout.dtype;
  dispatch_pair(dout.dtype, dx_dtype, kOp, [&](auto in, auto out) {
    using In = typename decltype(in)::type;
    using Out = typename decltype(out)::type;
    if (args.dbias) {
      const Columns<In, Out> columns{
          dout.ptr<In>(), args.dx.ptr<Out>(), args.workspace.memory.ptr<float>(),
          dout.rows(),    dout.cols(),        0};
      const int64_t parts = sum_columns(columns, randomness, dout.device, stream_of(stream));
      finish_column_sums(args.workspace, parts, dout.cols(), args.dbias, {}, stream_of(stream));
    } else {
      const Line<In, Out> line{dout.ptr<In>(),     nullptr,      nullptr,
                               args.dx.ptr<Out>(), dout.numel(), dout.cols()};
      launch_line(line, randomness, stream_of(stream));
    }
  });
}

}  // namespace te::cuda
