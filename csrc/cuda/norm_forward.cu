// Norm forward with one result, plain or row-wise FP8. A row is read from memory once, into the
// registers of a part of a warp, of one warp or of one block. A block that takes several rows loads
// a pack of its next row as soon as the result of the same pack of this row is computed, so that
// loads are always in flight.
#include "cuda/device/dependent_launch.cuh"
#include "cuda/device/float8.cuh"
#include "cuda/device/norm_row.cuh"
#include "cuda/device/quantized_sink.cuh"
#include "cuda/norm.h"
#include "cuda/policy/norm.h"

namespace te::cuda {
namespace {

constexpr const char* kOp = "norm_forward";
constexpr int kMaxThreads = 1024;
constexpr int kBlocksSharing = blocks_sharing(0, 1, kMaxThreads);

struct Codes {};  // the result type of FP8

struct Problem {
  const void* x = nullptr;
  const void* gamma = nullptr;
  const void* beta = nullptr;
  float gamma_offset = 0.0f;  // 1 with a zero-centred gamma
  float epsilon = 0.0f;
  float inverse_cols = 0.0f;
  int64_t rows = 0;
  int cols = 0;
  void* y = nullptr;
  bool e5m2 = false;
  QuantizedSink fp8;         // with Codes
  CurrentScaleSink current;  // without Codes; no scratch: no current scale
  float* mean = nullptr;
  float* rstd = nullptr;

  // Whether blocks have an amax to report.
  bool tracked() const { return fp8.amax || current.scratch; }
};

// The mean is mean + rest, because one fp32 number is not accurate enough for the mean of fp32
// values. x minus the mean is computed as (x - mean) - rest.
struct Statistics {
  float mean, rest, rstd;
};

// The part of one row that a thread holds. A warp has kPacks times 32 neighbouring packs, so that
// the distance from a thread's pack to its next is a constant.
template <class In, class Gamma, NormKind kKind, int kPacks>
struct Row {
  static constexpr int kWidth = 16 / sizeof(In);
  static constexpr bool kCentered = kKind == NormKind::LayerNorm;

  Packed<In, kWidth> x[kPacks];

  __device__ __forceinline__ static int first_pack() {
    const int warp = static_cast<int>(threadIdx.x) / 32, lane = static_cast<int>(threadIdx.x) % 32;
    return warp * 32 * kPacks + lane;
  }
  // `packs`: the packs of the row from first_pack() on.
  __device__ __forceinline__ static bool has(int j, int packs) { return 32 * j < packs; }

  // Pack j of a row of T whose first pack of this thread is at `base`.
  template <class T>
  __device__ __forceinline__ static const char* at(const char* base, int j) {
    return base + j * 32 * kWidth * static_cast<int>(sizeof(T));
  }

  // Adds term(value) of all values of this thread; packs that do not exist hold zeros.
  template <class Term>
  __device__ __forceinline__ float sum(Term&& term) const {
    float total = 0.0f;
#pragma unroll
    for (int j = 0; j < kPacks; ++j) {
      float values[kWidth];
      x[j].convert(values);
      total += sum_of(values, term);
    }
    return total;
  }

  __device__ __forceinline__ Statistics statistics(const Problem& p, int packs,
                                                   RowSum& row_sum) const {
    if constexpr (!kCentered) {
      const float squares = row_sum(sum([](float value) { return value * value; }));
      return {0.0f, 0.0f, rsqrtf(squares * p.inverse_cols + p.epsilon)};
    } else if constexpr (sizeof(In) == 2) {
      return by_packs(p, packs, row_sum);
    } else {
      return twice(p, packs, row_sum);
    }
  }

  // Sums the squared deviations from the mean of each pack, and adds those of the packs' means from
  // the mean of the row. So values are converted to fp32 only once.
  __device__ __forceinline__ Statistics by_packs(const Problem& p, int packs,
                                                 RowSum& row_sum) const {
    float total = 0.0f, squares = 0.0f, means[kPacks];
#pragma unroll
    for (int j = 0; j < kPacks; ++j) {
      float values[kWidth];
      x[j].convert(values);
      const float sum = sum_of(values, [](float value) { return value; });
      total += sum;
      means[j] = sum / kWidth;
      squares += sum_of(values, [&](float value) {
        const float distance = value - means[j];
        return distance * distance;
      });
    }
    const float mean = __fmul_rn(row_sum(total), p.inverse_cols);  // never fused into its uses
#pragma unroll
    for (int j = 0; j < kPacks; ++j) {
      const float distance = means[j] - mean;
      if (has(j, packs)) squares += kWidth * distance * distance;
    }
    return {mean, 0.0f, rsqrtf(row_sum(squares) * p.inverse_cols + p.epsilon)};
  }

  // For fp32 values, the rounding error of the mean itself matters. A second pass over the
  // registers finds it.
  __device__ __forceinline__ Statistics twice(const Problem& p, int packs, RowSum& row_sum) const {
    const float total = row_sum(sum([](float value) { return value; }));
    const float mean = __fmul_rn(total, p.inverse_cols);
    float distances = 0.0f, squares = 0.0f;
#pragma unroll
    for (int j = 0; j < kPacks; ++j) {
      if (!has(j, packs)) continue;
      float values[kWidth];
      x[j].convert(values);
      distances += sum_of(values, [=](float value) { return value - mean; });
      squares += sum_of(values, [=](float value) { return (value - mean) * (value - mean); });
    }
    const float rest = __fmul_rn(row_sum(distances), p.inverse_cols);
    const float variance = row_sum(squares) * p.inverse_cols - rest * rest;
    // Not fmaxf, which would make 0 of NaN.
    return {mean, rest, rsqrtf((variance < 0.0f ? 0.0f : variance) + p.epsilon)};
  }

  // Computes y of pack j. `gamma_row` and `beta_row` point to the first pack of this thread.
  __device__ __forceinline__ void result(const Problem& p, const Statistics& s,
                                         const char* gamma_row, const char* beta_row, int j,
                                         float (&y)[kWidth]) const {
    Packed<Gamma, kWidth> packed_gamma, packed_beta;
    packed_gamma.load_global(at<Gamma>(gamma_row, j));
    if constexpr (kCentered) packed_beta.load_global(at<Gamma>(beta_row, j));
    float gamma[kWidth], beta[kWidth];
    packed_gamma.convert(gamma);
    if constexpr (kCentered) packed_beta.convert(beta);
    x[j].convert(y);
    const Standardised standardised(s.mean, s.rstd);
#pragma unroll
    for (int k = 0; k < kWidth; ++k) {
      if constexpr (!kCentered)
        y[k] *= s.rstd;
      else if constexpr (sizeof(In) == 2)
        y[k] = standardised(y[k]);
      else
        y[k] = ((y[k] - s.mean) - s.rest) * s.rstd;
      y[k] *= gamma[k] + p.gamma_offset;
      if constexpr (kCentered) y[k] += beta[k];
    }
  }
};

template <class Fp8, int N>
__device__ __forceinline__ void store_codes(void* to, const float (&y)[N], float scale) {
  Pack<uint32_t, N / 4> codes;
#pragma unroll
  for (int k = 0; k < N; k += 4)
    codes.at[k / 4] =
        encode4<Fp8>(y[k] * scale, y[k + 1] * scale, y[k + 2] * scale, y[k + 3] * scale);
  store_pack_global(static_cast<uint32_t*>(to), codes);
}

template <class Out, int N>
__device__ __forceinline__ void store(const Problem& p, void* to, const float (&y)[N],
                                      float scale) {
  if constexpr (!std::is_same_v<Out, Codes>)
    store_values<Out>(to, y);
  else if (p.e5m2)
    store_codes<E5M2>(to, y, scale);
  else
    store_codes<E4M3>(to, y, scale);
}

template <int N>
__device__ __forceinline__ float amax_of(const float (&y)[N]) {
  float amax = 0.0f;
#pragma unroll
  for (int k = 0; k < N; ++k) amax = fmaxf(amax, fabsf(y[k]));
  return amax;
}

// Reports the amax of the block's results. With current scaling it is that of the rounded results;
// rounding keeps the order, so the amax itself is rounded.
template <class Out>
__device__ __forceinline__ void finish(const Problem& p, float amax) {
  __shared__ float slots[32];
  amax = warp_reduce(amax, Max{});
  const int thread = static_cast<int>(threadIdx.y * blockDim.x + threadIdx.x);
  const int warps = static_cast<int>(blockDim.x * blockDim.y) / 32;
  if (thread % 32 == 0) slots[thread / 32] = amax;
  __syncthreads();
  if (thread != 0) return;
  for (int warp = 1; warp < warps; ++warp) amax = fmaxf(amax, slots[warp]);
  if constexpr (std::is_same_v<Out, Codes>)
    atomic_max(p.fp8.amax, amax);
  else
    p.current.finish(static_cast<float>(Out(amax)), gridDim.x);
}

// kTracked: the kernel can compute an amax, and does so if the pointer for it is not null.
template <class In, class Gamma, class Out, NormKind kKind, int kPacks, bool kTracked>
__global__ void __launch_bounds__(kPacks == 1 ? 128 : kMaxThreads, kBlocksSharing)
    forward_kernel(const __grid_constant__ Problem p) {
  follow_previous_kernel();
  using R = Row<In, Gamma, kKind, kPacks>;
  constexpr bool kCodes = std::is_same_v<Out, Codes>;
  using Stored = std::conditional_t<kCodes, uint8_t, Out>;
  __shared__ RowSum::Slots slots;
  const int packs = p.cols / R::kWidth - R::first_pack();
  const int64_t step = int64_t{gridDim.x} * blockDim.y;
  int64_t row = int64_t{blockIdx.x} * blockDim.y + threadIdx.y;
  const bool tracked = kCodes ? p.fp8.amax != nullptr : p.current.scratch != nullptr;
  float scale = 1.0f, amax = 0.0f;
  if constexpr (kCodes)
    scale = p.fp8.scale_used(blockIdx.x == 0 && threadIdx.x == 0 && threadIdx.y == 0);

  const int64_t first = row * p.cols + R::first_pack() * R::kWidth;
  const char* from = static_cast<const char*>(p.x) + first * static_cast<int64_t>(sizeof(In));
  char* to = reinterpret_cast<char*>(kCodes ? p.fp8.rowwise : static_cast<uint8_t*>(p.y)) +
             first * static_cast<int64_t>(sizeof(Stored));
  const int64_t from_step = step * p.cols * static_cast<int64_t>(sizeof(In));
  const int64_t to_step = step * p.cols * static_cast<int64_t>(sizeof(Stored));
  const int gamma_first = R::first_pack() * R::kWidth * static_cast<int>(sizeof(Gamma));
  const char* gamma = static_cast<const char*>(p.gamma) + gamma_first;
  const char* beta = static_cast<const char*>(p.beta) + gamma_first;
  R current;
#pragma unroll
  for (int j = 0; j < kPacks; ++j)
    current.x[j].template load_where<false>(R::template at<In>(from, j),
                                            row < p.rows && R::has(j, packs));

  RowSum row_sum(slots);
  for (; row < p.rows; row += step) {
    const Statistics s = current.statistics(p, packs, row_sum);
    if (threadIdx.x == 0) {
      if constexpr (R::kCentered) p.mean[row] = s.mean + s.rest;
      p.rstd[row] = s.rstd;
    }
    const bool more = row + step < p.rows;
    from += from_step;
    // Kept in registers, not computed again for every pack.
    asm volatile("" : "+l"(from), "+l"(to), "+l"(gamma), "+l"(beta));
#pragma unroll
    for (int j = 0; j < kPacks; ++j) {
      if (!R::has(j, packs)) continue;
      if constexpr (sizeof(In) == 2) current.x[j].stay_packed();
      float y[R::kWidth];
      current.result(p, s, gamma, beta, j, y);
      current.x[j].template load_where<true>(R::template at<In>(from, j), more);
      if constexpr (kTracked) {
        if (tracked) amax = fmaxf(amax, amax_of(y));
      }
      store<Out>(p, const_cast<char*>(R::template at<Stored>(to, j)), y, scale);
    }
    to += to_step;
  }
  if constexpr (kTracked) {
    if (tracked) finish<Out>(p, amax);
  }
}

// How many blocks of a kernel a multiprocessor holds.
template <class Kernel>
int resident_blocks(Kernel* kernel, int threads) {
  int blocks = 0;
  check(cudaOccupancyMaxActiveBlocksPerMultiprocessor(&blocks, kernel, threads, 0), kOp);
  return blocks;
}

template <class In, class Gamma, class Out, NormKind kKind, int kPacks, bool kTracked>
void launch(const Problem& p, const NormRowsPolicy& policy, Device device, cudaStream_t stream) {
  static AskedOncePerDevice<kMaxThreads / 32 + 1> resident;
  const auto kernel = forward_kernel<In, Gamma, Out, kKind, kPacks, kTracked>;
  const int threads = policy.threads * policy.rows;
  const int64_t blocks =
      resident(device, threads / 32, [&] { return resident_blocks(kernel, threads); });
  const bool staying = p.tracked() || policy.rows > 1;
  const int64_t grid =
      norm_rows_grid(ceil_div(p.rows, policy.rows), blocks * multiprocessors(device), staying);
  const dim3 block(static_cast<unsigned>(policy.threads), static_cast<unsigned>(policy.rows));
  launch_dependent(kernel, static_cast<unsigned>(grid), block, 0, stream, p);
}

template <class In, class Gamma, class Out>
bool launch(const NormForwardArgs& args, const Problem& p, cudaStream_t stream) {
  const auto policy = norm_rows_policy(p.cols * static_cast<int64_t>(sizeof(In)) / 16);
  const Device device = args.x.device;
  dispatch_bool(args.kind == NormKind::LayerNorm, [&](auto layer) {
    constexpr auto kKind = layer() ? NormKind::LayerNorm : NormKind::RMSNorm;
    if (policy.packs == 1)
      launch<In, Gamma, Out, kKind, 1, true>(p, policy, device, stream);
    else if (args.current || args.quantized)
      launch<In, Gamma, Out, kKind, 4, true>(p, policy, device, stream);
    else if constexpr (!std::is_same_v<Out, Codes>)
      launch<In, Gamma, Out, kKind, 4, false>(p, policy, device, stream);
  });
  return true;
}

// The kernel is compiled for the dtypes that training uses: fp32 x with y of any dtype, 16-bit x
// with y of the same dtype, and gamma in the dtype of x or in fp32.
template <class In, class Gamma>
bool launch(const NormForwardArgs& args, const Problem& p, cudaStream_t stream) {
  if (!args.y) return launch<In, Gamma, Codes>(args, p, stream);
  if (args.y.dtype == args.x.dtype) return launch<In, Gamma, In>(args, p, stream);
  if constexpr (std::is_same_v<In, float>) {
    if (args.y.dtype == DType::BFloat16) return launch<In, Gamma, BFloat16>(args, p, stream);
    return launch<In, Gamma, Half>(args, p, stream);
  }
  return false;
}

bool fits(const NormForwardArgs& args) {
  const int64_t row_bytes = args.x.cols() * size_of(args.x.dtype);
  const TensorView& out = args.y ? args.y : args.quantized.rowwise;
  for (const TensorView* t : {&args.x, &args.gamma, &args.beta, &out})
    if (!is_aligned(t->data, 16)) return false;
  return row_bytes % 16 == 0 && norm_rows_policy(row_bytes / 16).threads != 0;
}

}  // namespace

bool norm_forward_rows(const NormForwardArgs& args, cudaStream_t stream) {
  const bool one_result = args.y ? !args.quantized : !args.quantized.columnwise;
  if (!one_result || !fits(args)) return false;
  const Problem p{.x = args.x.data,
                  .gamma = args.gamma.data,
                  .beta = args.beta.data,
                  .gamma_offset = args.zero_centered ? 1.0f : 0.0f,
                  .epsilon = args.epsilon,
                  .inverse_cols = 1.0f / static_cast<float>(args.x.cols()),
                  .rows = args.x.rows(),
                  .cols = static_cast<int>(args.x.cols()),
                  .y = args.y.data,
                  .e5m2 = args.quantized.dtype == DType::Float8E5M2,
                  .fp8 = sink_of(args.quantized),
                  .current = sink_of(args.current),
                  .mean = args.mean.ptr<float>(),
                  .rstd = args.rstd.ptr<float>()};
  return dispatch_high_precision(args.x.dtype, kOp, [&](auto tag) {
    using In = typename decltype(tag)::type;
    if (args.gamma.dtype == args.x.dtype) return launch<In, In>(args, p, stream);
    if (args.gamma.dtype == DType::Float32) return launch<In, float>(args, p, stream);
    return false;
  });
}

}  // namespace te::cuda
