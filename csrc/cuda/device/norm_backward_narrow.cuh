// The work of a block in norm_backward_narrow.cu. A warp, or a part of a warp, handles one row of x
// and dy in registers, one pack per lane, and each lane sums dgamma and dbeta of its columns over
// many rows. The next row is loaded as soon as the current one is converted to fp32. Warps do not
// wait for each other until they add up dgamma and dbeta at the end.
#pragma once

#include "cuda/device/norm_row.cuh"
#include "cuda/norm_backward_problem.h"

namespace te::cuda::norm_narrow {

template <class In, class Gradient, NormKind kKind>
class Worker {
  static constexpr bool kCentered = kKind == NormKind::LayerNorm;
  static constexpr int kWidth = sizeof(In) + sizeof(Gradient) == 4 ? 8 : 4;  // values of a pack

 public:
  // `sums`: shared memory, `cols` fp32 numbers for each warp.
  __device__ __forceinline__ Worker(const NormBackwardProblem& problem, float* sums)
      : p(problem),
        sums_(sums),
        column_(static_cast<int>(threadIdx.x) * kWidth),
        exists_(column_ < problem.cols) {}

  __device__ __forceinline__ void run() {
    const int step = static_cast<int>(gridDim.x * blockDim.y);
    int row = static_cast<int>(blockIdx.x * blockDim.y + threadIdx.y);
    load(row);
    load_residual(row);
    if (exists_) load_gamma();
#pragma unroll 1
    for (; row < p.rows; row += step) {
      Row now = converted();
      load(row + step);
      const float2 sums = sum_over_row(add(now));
      if (exists_) write(now, sums, row);
      load_residual(row + step);
    }
    float* out = p.partials + int64_t{blockIdx.x} * 2 * p.cols;
    write_partials(dgamma_, out);
    if constexpr (kCentered) {
      __syncthreads();
      write_partials(dbeta_, out + p.cols);
    }
  }

 private:
  // The normalised x, and dy, which add() multiplies by gamma. Lanes beyond the last column have a
  // dy of zero.
  struct Row {
    float rstd, xhat[kWidth], dy[kWidth];
  };

  __device__ __forceinline__ static int lanes() { return static_cast<int>(blockDim.x); }
  __device__ __forceinline__ static int thread() {
    return static_cast<int>(threadIdx.y * blockDim.x + threadIdx.x);
  }

  // Beyond the last row, the last one is loaded and not used.
  __device__ __forceinline__ int64_t place(int row) const {
    return int64_t{min(row, p.rows - 1)} * p.cols + column_;
  }
  __device__ __forceinline__ void load(int row) {
    const int known = min(row, p.rows - 1);
    if constexpr (kCentered) mean_ = __ldg(p.mean + known);
    rstd_ = __ldg(p.rstd + known);
    if (!exists_) return;
    x_.load_global(static_cast<const In*>(p.x) + place(row));
    dy_.load_global(static_cast<const Gradient*>(p.dy) + place(row));
  }
  __device__ __forceinline__ void load_residual(int row) {
    if (p.residual_grad && exists_)
      residual_.load_global(static_cast<const In*>(p.residual_grad) + place(row));
  }
  __device__ __forceinline__ void load_gamma() {
    with_dtype(p.gamma_dtype, [&](auto tag) {
      using T = typename decltype(tag)::type;
#pragma unroll
      for (int k = 0; k < kWidth; ++k)
        gamma_[k] =
            static_cast<float>(static_cast<const T*>(p.gamma)[column_ + k]) + p.gamma_offset;
    });
  }

  __device__ __forceinline__ Row converted() const {
    Row row;
    row.rstd = rstd_;
    x_.convert(row.xhat);
    dy_.convert(row.dy);
    const Standardised standardised(mean_, rstd_);
#pragma unroll
    for (int k = 0; k < kWidth; ++k) {
      if constexpr (!kCentered)
        row.xhat[k] *= rstd_;
      else if constexpr (sizeof(In) == 2)
        row.xhat[k] = standardised(row.xhat[k]);
      else
        row.xhat[k] = (row.xhat[k] - mean_) * rstd_;
    }
    return row;
  }

  // Adds a row to dgamma and dbeta, and replaces dy by g dy (g: gamma). Returns {sum of g dy xhat,
  // sum of g dy} of this lane.
  __device__ __forceinline__ float2 add(Row& row) {
    float2 sums{0.0f, 0.0f};
#pragma unroll
    for (int k = 0; k < kWidth; ++k) {
      dgamma_[k] += row.dy[k] * row.xhat[k];
      if constexpr (kCentered) dbeta_[k] += row.dy[k];
      row.dy[k] *= gamma_[k];
      sums.x += row.dy[k] * row.xhat[k];
      if constexpr (kCentered) sums.y += row.dy[k];
    }
    return sums;
  }

  // The shuffles include only the lanes of one row: other rows of the warp may not exist, and their
  // lanes have left the loop.
  __device__ __forceinline__ static float2 sum_over_row(float2 sums) {
    const unsigned first = static_cast<unsigned>(thread()) % 32 / blockDim.x * blockDim.x;
    const unsigned mask = (0xffffffffu >> (32 - blockDim.x)) << first;
#pragma unroll
    for (int offset = 16; offset > 0; offset /= 2) {
      if (offset >= lanes()) continue;
      sums.x += __shfl_xor_sync(mask, sums.x, offset);
      if constexpr (kCentered) sums.y += __shfl_xor_sync(mask, sums.y, offset);
    }
    return sums;
  }

  // dx = rstd (g dy - mean of g dy - xhat * mean of g dy xhat).
  __device__ __forceinline__ void write(const Row& row, float2 sums, int number) const {
    const float along = -sums.x * p.inverse_cols * row.rstd;
    const float offset = -sums.y * p.inverse_cols * row.rstd;
    float values[kWidth];
#pragma unroll
    for (int k = 0; k < kWidth; ++k) {
      values[k] = kCentered ? fmaf(row.xhat[k], along, offset) : row.xhat[k] * along;
      values[k] = fmaf(row.dy[k], row.rstd, values[k]);
    }
    if (p.residual_grad) {
      float residual[kWidth];
      residual_.convert(residual);
#pragma unroll
      for (int k = 0; k < kWidth; ++k) values[k] += residual[k];
    }
    store_values<In>(static_cast<In*>(p.dx) + place(number), values);
  }

  // Writes the block's sums of dgamma or dbeta. Shuffles add up the rows of a warp; then each
  // thread adds up the warps for a few columns, in order.
  __device__ __forceinline__ void write_partials(float (&sums)[kWidth], float* out) const {
#pragma unroll
    for (int k = 0; k < kWidth; ++k) {
#pragma unroll
      for (int offset = 16; offset > 0; offset /= 2)
        if (offset >= lanes()) sums[k] += __shfl_xor_sync(0xffffffffu, sums[k], offset);
    }
    if (exists_ && thread() % 32 < lanes()) {
#pragma unroll
      for (int k = 0; k < kWidth; k += 4)
        store_pack(sums_ + thread() / 32 * p.cols + column_ + k,
                   Pack<float, 4>{sums[k], sums[k + 1], sums[k + 2], sums[k + 3]});
    }
    __syncthreads();
    const int threads = lanes() * static_cast<int>(blockDim.y);
#pragma unroll 1
    for (int col = thread(); col < p.cols; col += threads) {
      float total = 0.0f;
#pragma unroll 4
      for (int warp = 0; warp < threads / 32; ++warp) total += sums_[warp * p.cols + col];
      out[col] = total;
    }
  }

  const NormBackwardProblem& p;
  float* sums_;
  int column_;
  bool exists_;
  float mean_ = 0.0f, rstd_ = 0.0f;
  Packed<In, kWidth> x_, residual_;
  Packed<Gradient, kWidth> dy_;
  float gamma_[kWidth] = {};
  float dgamma_[kWidth] = {};
  float dbeta_[kWidth] = {};  // unused in RMSNorm, and then in no register
};

}  // namespace te::cuda::norm_narrow
