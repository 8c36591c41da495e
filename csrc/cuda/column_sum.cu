#include "cuda/column_sum.h"

#include "cuda/device/dependent_launch.cuh"
#include "cuda/device/tensor_batch.cuh"
#include "cuda/device/vector.cuh"

namespace te::cuda {
namespace {

constexpr int kColumns = 32;  // columns of a block: 128 contiguous bytes of a part
constexpr int kThreads = 512;
constexpr int kWarps = kThreads / 32;

struct Sum {
  const float* parts;
  void* out;
  int64_t count;
  int64_t pitch;
  int64_t cols;
  DType dtype;
  bool wide;  // four columns may be read at once
};

using Batch = TensorBatch<Sum, 64>;
static_assert(sizeof(Batch) <= 4096);  // the limit of a kernel's arguments

// The sums of kWide columns over the parts of this thread: `first` and every kSide-th part after
// it.
template <int kWide, int kSide>
__device__ __forceinline__ Pack<float, kWide> sum_of_parts(const float* parts, int64_t count,
                                                           int64_t pitch, int first) {
  Pack<float, kWide> sum{};
#pragma unroll 4
  for (int64_t part = first; part < count; part += kSide) {
    const auto values = load_pack<float, kWide>(parts + part * pitch);
#pragma unroll
    for (int k = 0; k < kWide; ++k) sum.at[k] += values.at[k];
  }
  return sum;
}

// Adds the parts of a block's columns. The parts are divided among threads that own the same
// columns: those of one warp add their sums by shuffles, and each warp leaves one sum of a column.
template <int kWide>
__device__ __forceinline__ void add_parts(const Sum& of, int64_t block_col,
                                          float (&sums)[kWarps][kColumns]) {
  constexpr int kOwners = kColumns / kWide;  // threads that cover the block's columns once
  const int thread = static_cast<int>(threadIdx.x), lane = thread % 32;
  const int owned = lane % kOwners * kWide;
  Pack<float, kWide> sum{};
  if (block_col + owned < of.cols)
    sum = sum_of_parts<kWide, kThreads / kOwners>(of.parts + block_col + owned, of.count, of.pitch,
                                                  thread / kOwners);
#pragma unroll
  for (int k = 0; k < kWide; ++k)
#pragma unroll
    for (int offset = 16; offset >= kOwners; offset /= 2)
      sum.at[k] += __shfl_xor_sync(0xffffffffu, sum.at[k], offset);
  if (lane < kOwners) store_pack(&sums[thread / 32][owned], sum);
}

__device__ __forceinline__ void store(const Sum& of, int64_t col, float value) {
  switch (of.dtype) {
    case DType::Float16: static_cast<Half*>(of.out)[col] = Half(value); break;
    case DType::BFloat16: static_cast<BFloat16*>(of.out)[col] = BFloat16(value); break;
    default: static_cast<float*>(of.out)[col] = value;
  }
}

// A block sums 32 columns over all parts.
__global__ void __launch_bounds__(kThreads)
    add_column_parts_kernel(const __grid_constant__ Batch batch) {
  __shared__ float sums[kWarps][kColumns];
  follow_previous_kernel();
  const int index = batch.tensor_of(blockIdx.x);
  const Sum& of = batch.tensors[index];
  const int64_t block_col = int64_t{blockIdx.x - batch.first_block[index]} * kColumns;
  if (of.wide)
    add_parts<4>(of, block_col, sums);
  else
    add_parts<1>(of, block_col, sums);
  __syncthreads();
  const int thread = static_cast<int>(threadIdx.x);
  if (thread >= kColumns || block_col + thread >= of.cols) return;
  float total = sums[0][thread];
#pragma unroll
  for (int warp = 1; warp < kWarps; ++warp) total += sums[warp][thread];
  store(of, block_col + thread, total);
}

}  // namespace

void add_column_parts(const ColumnSums& sums, Stream stream) {
  const DeviceGuard guard(sums.front().out.device);
  Batch batch;
  const auto launch = [&] {
    if (batch.blocks != 0)
      launch_dependent(add_column_parts_kernel, batch.blocks, kThreads, 0, stream_of(stream),
                       batch);
    batch.clear();
  };
  for (const ColumnSum& sum : sums) {
    const int64_t cols = sum.out.numel();
    const bool wide = cols % 4 == 0 && sum.pitch % 4 == 0 && is_aligned(sum.parts, 16);
    const Sum one{sum.parts, sum.out.data, sum.count, sum.pitch, cols, sum.out.dtype, wide};
    batch.add(one, ceil_div(cols, kColumns));
    if (batch.is_full()) launch();
  }
  launch();
}

void finish_column_sums(const ColumnSumWorkspace& workspace, int64_t parts, int64_t pitch,
                        const TensorView& first, const TensorView& second, cudaStream_t stream) {
  const auto* memory = workspace.memory.ptr<float>();
  ColumnSums sums{{memory, parts, pitch, first}};
  if (second) sums.push_back({memory + first.numel(), parts, pitch, second});
  if (workspace.later == nullptr) return add_column_parts(sums, {stream});
  workspace.later->insert(workspace.later->end(), sums.begin(), sums.end());
}

}  // namespace te::cuda
