// The norms for every size, alignment and set of dtypes: one element at a time, with dtypes known
// at run time. Correct, not fast; norm.cpp uses them if no other kernel takes the problem.
#include "cuda/column_sum.h"
#include "cuda/device/dependent_launch.cuh"
#include "cuda/device/norm_row.cuh"
#include "cuda/device/quantized_sink.cuh"
#include "cuda/norm.h"
#include "ops/column_sum.h"

namespace te::cuda {
namespace {

constexpr int kThreads = 256;
constexpr int64_t kBlocksPerMultiprocessor = 8;
constexpr int64_t kMaxParts = 64;

// A tensor of any of the three dtypes, or none.
struct Values {
  void* data = nullptr;
  DType dtype = DType::Float32;

  __device__ __forceinline__ explicit operator bool() const { return data != nullptr; }

  __device__ __forceinline__ float get(int64_t i) const {
    switch (dtype) {
      case DType::BFloat16: return static_cast<float>(static_cast<const BFloat16*>(data)[i]);
      case DType::Float16: return static_cast<float>(static_cast<const Half*>(data)[i]);
      default: return static_cast<const float*>(data)[i];
    }
  }
  // Returns the value as rounded.
  __device__ __forceinline__ float put(int64_t i, float value) const {
    switch (dtype) {
      case DType::BFloat16:
        static_cast<BFloat16*>(data)[i] = BFloat16(value);
        return static_cast<float>(BFloat16(value));
      case DType::Float16:
        static_cast<Half*>(data)[i] = Half(value);
        return static_cast<float>(Half(value));
      default: static_cast<float*>(data)[i] = value; return value;
    }
  }
};

Values values_of(const TensorView& t) { return {t.data, t.dtype}; }

struct ForwardProblem {
  Values x, gamma, beta, y;
  bool centered = false;
  float gamma_offset = 0.0f;
  float epsilon = 0.0f;
  int64_t rows = 0, cols = 0;
  bool e5m2 = false;
  QuantizedSink fp8;
  CurrentScaleSink current;
  float* mean = nullptr;
  float* rstd = nullptr;
};

// Sum of term(j) over the columns; all threads of the block get it.
template <class Term>
__device__ float sum_over_row(int64_t cols, RowSum& row_sum, Term&& term) {
  float sum = 0.0f;
  for (int64_t j = threadIdx.x; j < cols; j += kThreads) sum += term(j);
  return row_sum(sum);
}

// Writes one row; returns the amax of what this thread wrote.
__device__ float forward_row(const ForwardProblem& p, int64_t row, float scale, RowSum& row_sum) {
  const int64_t start = row * p.cols;
  const auto count = static_cast<float>(p.cols);
  float mean = 0.0f, rest = 0.0f;
  if (p.centered) {
    mean = sum_over_row(p.cols, row_sum, [&](int64_t j) { return p.x.get(start + j); }) / count;
    rest = sum_over_row(p.cols, row_sum, [&](int64_t j) { return p.x.get(start + j) - mean; });
    rest /= count;
  }
  const float squares = sum_over_row(p.cols, row_sum, [&](int64_t j) {
    const float value = p.x.get(start + j) - mean - rest;
    return value * value;
  });
  const float rstd = rsqrtf(squares / count + p.epsilon);
  if (threadIdx.x == 0) {
    if (p.centered) p.mean[row] = mean + rest;
    p.rstd[row] = rstd;
  }
  float amax = 0.0f;
  for (int64_t j = threadIdx.x; j < p.cols; j += kThreads) {
    float y = (p.x.get(start + j) - mean - rest) * rstd * (p.gamma.get(j) + p.gamma_offset);
    if (p.beta) y += p.beta.get(j);
    const float rounded = p.y ? p.y.put(start + j, y) : y;
    amax = fmaxf(amax, fabsf(p.current.scratch ? rounded : y));
    const uint8_t code = p.e5m2 ? E5M2::encode(y * scale) : E4M3::encode(y * scale);
    if (p.fp8.rowwise) p.fp8.rowwise[start + j] = code;
    if (p.fp8.columnwise) p.fp8.columnwise[j * p.rows + row] = code;
  }
  return amax;
}

__global__ void __launch_bounds__(kThreads)
    forward_kernel(const __grid_constant__ ForwardProblem p) {
  follow_previous_kernel();
  __shared__ float slots[kThreads / 32];
  float scale = 1.0f, amax = 0.0f;
  if (p.fp8.scale) scale = p.fp8.scale_used(blockIdx.x == 0 && threadIdx.x == 0);
  __shared__ RowSum::Slots row_slots;
  RowSum row_sum(row_slots);
  for (int64_t row = blockIdx.x; row < p.rows; row += gridDim.x)
    amax = fmaxf(amax, forward_row(p, row, scale, row_sum));
  amax = block_reduce(amax, Max{}, 0.0f, slots);
  if (threadIdx.x != 0) return;
  if (p.fp8.amax) atomic_max(p.fp8.amax, amax);
  if (p.current.scratch) p.current.finish(amax, gridDim.x);
}

struct BackwardProblem {
  Values dy, x, gamma, residual_grad, dx;
  bool centered = false;
  float gamma_offset = 0.0f;
  int64_t rows = 0, cols = 0;
  const float* mean = nullptr;
  const float* rstd = nullptr;
  float* partials = nullptr;  // [parts][2][cols]: dgamma, dbeta
  int64_t rows_per_part = 0;

  __device__ __forceinline__ float xhat(int64_t row, int64_t j) const {
    const float value = x.get(row * cols + j);
    return (centered ? value - mean[row] : value) * rstd[row];
  }
};

__global__ void __launch_bounds__(kThreads, 1)
    data_kernel(const __grid_constant__ BackwardProblem p) {
  follow_previous_kernel();
  __shared__ RowSum::Slots row_slots;
  RowSum row_sum(row_slots);
  const auto count = static_cast<float>(p.cols);
  for (int64_t row = blockIdx.x; row < p.rows; row += gridDim.x) {
    const int64_t start = row * p.cols;
    const auto grad = [&](int64_t j) {
      return p.dy.get(start + j) * (p.gamma.get(j) + p.gamma_offset);
    };
    const float along =
        sum_over_row(p.cols, row_sum, [&](int64_t j) { return grad(j) * p.xhat(row, j); }) / count;
    const float offset = p.centered ? sum_over_row(p.cols, row_sum, grad) / count : 0.0f;
    for (int64_t j = threadIdx.x; j < p.cols; j += kThreads) {
      float dx = p.rstd[row] * (grad(j) - offset - p.xhat(row, j) * along);
      if (p.residual_grad) dx += p.residual_grad.get(start + j);
      p.dx.put(start + j, dx);
    }
  }
}

// A thread sums a column over the rows of one part.
__global__ void __launch_bounds__(kThreads)
    parameters_kernel(const __grid_constant__ BackwardProblem p) {
  follow_previous_kernel();
  const int64_t col = int64_t{blockIdx.x} * kThreads + threadIdx.x;
  const int64_t part = blockIdx.y, first = part * p.rows_per_part;
  if (col >= p.cols) return;
  float dgamma = 0.0f, dbeta = 0.0f;
  for (int64_t row = first; row < min(first + p.rows_per_part, p.rows); ++row) {
    const float dy = p.dy.get(row * p.cols + col);
    dgamma += dy * p.xhat(row, col);
    dbeta += dy;
  }
  p.partials[(2 * part) * p.cols + col] = dgamma;
  p.partials[(2 * part + 1) * p.cols + col] = dbeta;
}

unsigned grid_of_rows(const TensorView& x) {
  const int64_t resident = kBlocksPerMultiprocessor * multiprocessors(x.device);
  return static_cast<unsigned>(std::clamp<int64_t>(x.rows(), 1, resident));
}

}  // namespace

void norm_forward_any(const NormForwardArgs& args, cudaStream_t stream) {
  const ForwardProblem p{.x = values_of(args.x),
                         .gamma = values_of(args.gamma),
                         .beta = values_of(args.beta),
                         .y = values_of(args.y),
                         .centered = args.kind == NormKind::LayerNorm,
                         .gamma_offset = args.zero_centered ? 1.0f : 0.0f,
                         .epsilon = args.epsilon,
                         .rows = args.x.rows(),
                         .cols = args.x.cols(),
                         .e5m2 = args.quantized.dtype == DType::Float8E5M2,
                         .fp8 = sink_of(args.quantized),
                         .current = sink_of(args.current),
                         .mean = args.mean.ptr<float>(),
                         .rstd = args.rstd.ptr<float>()};
  launch_dependent(forward_kernel, grid_of_rows(args.x), kThreads, 0, stream, p);
}

void norm_backward_any(const NormBackwardArgs& args, cudaStream_t stream) {
  const int64_t rows = args.x.rows(), cols = args.x.cols();
  const int64_t rows_per_part = std::max(kRowsPerColumnPart, ceil_div(rows, kMaxParts));
  const int64_t parts = ceil_div(rows, rows_per_part);
  const BackwardProblem p{.dy = values_of(args.dy),
                          .x = values_of(args.x),
                          .gamma = values_of(args.gamma),
                          .residual_grad = values_of(args.residual_grad),
                          .dx = values_of(args.dx),
                          .centered = args.kind == NormKind::LayerNorm,
                          .gamma_offset = args.zero_centered ? 1.0f : 0.0f,
                          .rows = rows,
                          .cols = cols,
                          .mean = args.mean.ptr<float>(),
                          .rstd = args.rstd.ptr<float>(),
                          .partials = args.workspace.memory.ptr<float>(),
                          .rows_per_part = rows_per_part};
  if (rows > 0) {
    launch_dependent(data_kernel, grid_of_rows(args.x), kThreads, 0, stream, p);
    const dim3 grid(static_cast<unsigned>(ceil_div(cols, kThreads)), static_cast<unsigned>(parts));
    launch_dependent(parameters_kernel, grid, kThreads, 0, stream, p);
  }
  finish_column_sums(args.workspace, parts, 2 * cols, args.dgamma, args.dbeta, stream);
}

}  // namespace te::cuda
