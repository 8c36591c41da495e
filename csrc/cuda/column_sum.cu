#include "cuda/column_sum.h"

#include "cuda/device/dependent_launch.cuh"

namespace te::cuda {
namespace {

constexpr int kColumns = 32;  // a warp reads 128 contiguous bytes of a part
constexpr int kRows = 16;     // parts summed side by side, then in order

// blockIdx.y picks the vector.
template <class Out>
__global__ void __launch_bounds__(kColumns* kRows)
    reduce_kernel(const float* partials, int64_t parts, int64_t pitch, int64_t cols, Out* first,
                  Out* second) {
  __shared__ float sums[kRows][kColumns];
  wait_for_previous_kernel();
  const int64_t col = static_cast<int64_t>(blockIdx.x) * kColumns + threadIdx.x;
  partials += blockIdx.y * cols;
  float sum = 0.0f;
  if (col < cols)
#pragma unroll 4
    for (int64_t part = threadIdx.y; part < parts; part += kRows)
      sum += partials[part * pitch + col];
  sums[threadIdx.y][threadIdx.x] = sum;
  __syncthreads();
  if (threadIdx.y != 0 || col >= cols) return;
  for (int row = 1; row < kRows; ++row) sum += sums[row][threadIdx.x];
  (blockIdx.y == 0 ? first : second)[col] = Out(sum);
}

void launch(const float* partials, int64_t parts, int64_t pitch, const TensorView& first,
            const TensorView& second, cudaStream_t stream) {
  const int64_t cols = first.numel();
  if (cols == 0) return;
  const dim3 blocks(static_cast<unsigned>(ceil_div(cols, kColumns)), second ? 2 : 1);
  const dim3 threads(kColumns, kRows);
  dispatch_high_precision(first.dtype, "column_sum", [&](auto tag) {
    using Out = typename decltype(tag)::type;
    launch_dependent(&reduce_kernel<Out>, blocks, threads, stream, partials, parts, pitch, cols,
                     first.ptr<Out>(), second.ptr<Out>());
  });
}

}  // namespace

void reduce_column_parts(const float* partials, int64_t parts, int64_t pitch, const TensorView& out,
                         cudaStream_t stream) {
  launch(partials, parts, pitch, out, {}, stream);
}

void reduce_column_parts(const float* partials, int64_t parts, const TensorView& first,
                         const TensorView& second, cudaStream_t stream) {
  launch(partials, parts, 2 * first.numel(), first, second, stream);
}

}  // namespace te::cuda
