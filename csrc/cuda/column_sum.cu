#include "cuda/column_sum.h"

#include "cuda/device/dependent_launch.cuh"
#include "cuda/device/vector.cuh"

namespace te::cuda {
namespace {

constexpr int kColumns = 32;  // columns of a block: 128 contiguous bytes of a part
constexpr int kThreads = 512;
constexpr int kWarps = kThreads / 32;

// The sums of kWide columns over the parts of this thread: `first` and every kSide-th part after
// it.
template <int kWide, int kSide>
__device__ __forceinline__ Pack<float, kWide> sum_of_parts(const float* partials, int64_t parts,
                                                           int64_t pitch, int first) {
  Pack<float, kWide> sum{};
#pragma unroll 4
  for (int64_t part = first; part < parts; part += kSide) {
    const auto values = load_pack<float, kWide>(partials + part * pitch);
#pragma unroll
    for (int k = 0; k < kWide; ++k) sum.at[k] += values.at[k];
  }
  return sum;
}

// A block sums 32 columns of the vector blockIdx.y over all parts. The parts are divided among
// threads that own the same columns: those of one warp add their sums by shuffles, then the sums of
// the warps are added in order.
template <class Out, int kWide>
__global__ void __launch_bounds__(kThreads)
    reduce_kernel(const float* partials, int64_t parts, int64_t pitch, int64_t cols, Out* first,
                  Out* second) {
  constexpr int kOwners = kColumns / kWide;  // threads that cover the block's columns once
  __shared__ float sums[kWarps][kColumns];
  follow_previous_kernel();
  const int thread = static_cast<int>(threadIdx.x), lane = thread % 32;
  const int64_t block_col = static_cast<int64_t>(blockIdx.x) * kColumns;
  const int owned = lane % kOwners * kWide;
  partials += blockIdx.y * cols + block_col + owned;
  Pack<float, kWide> sum{};
  if (block_col + owned < cols)
    sum = sum_of_parts<kWide, kThreads / kOwners>(partials, parts, pitch, thread / kOwners);
#pragma unroll
  for (int k = 0; k < kWide; ++k)
#pragma unroll
    for (int offset = 16; offset >= kOwners; offset /= 2)
      sum.at[k] += __shfl_xor_sync(0xffffffffu, sum.at[k], offset);
  if (lane < kOwners) store_pack(&sums[thread / 32][owned], sum);
  __syncthreads();
  if (thread >= kColumns || block_col + thread >= cols) return;
  float total = sums[0][thread];
#pragma unroll
  for (int warp = 1; warp < kWarps; ++warp) total += sums[warp][thread];
  (blockIdx.y == 0 ? first : second)[block_col + thread] = Out(total);
}

void launch(const float* partials, int64_t parts, int64_t pitch, const TensorView& first,
            const TensorView& second, cudaStream_t stream) {
  const int64_t cols = first.numel();
  if (cols == 0) return;
  const dim3 blocks(static_cast<unsigned>(ceil_div(cols, kColumns)), second ? 2 : 1);
  const bool wide = cols % 4 == 0 && pitch % 4 == 0 && is_aligned(partials, 16);
  dispatch_high_precision(first.dtype, "column_sum", [&](auto tag) {
    using Out = typename decltype(tag)::type;
    launch_dependent(wide ? &reduce_kernel<Out, 4> : &reduce_kernel<Out, 1>, blocks, dim3(kThreads),
                     0, stream, partials, parts, pitch, cols, first.ptr<Out>(), second.ptr<Out>());
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
