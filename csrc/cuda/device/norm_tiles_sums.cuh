// Mean and rstd of rows that the blocks of a cluster share (norm_tiles.cu). Each warp finds the
// sums of its part of eight rows and sends them to all blocks, which merge them.
#pragma once

#include "cuda/device/cluster.cuh"
#include "cuda/device/norm_row.cuh"
#include "cuda/device/norm_tiles_ring.cuh"
#include "cuda/device/tensor_core.cuh"

namespace te::cuda::norm_tiles {

// The sum over the four lanes of one row.
__device__ __forceinline__ float sum_of_four(float value) {
  value += __shfl_xor_sync(0xffffffffu, value, 2);
  return value + __shfl_xor_sync(0xffffffffu, value, 1);
}

// Sums of eight rows, each over the eight lanes with the same lane % 4; lane l gets that of row l /
// 4. Each exchange halves the number of rows that a lane keeps: 7 shuffles instead of 24.
__device__ __forceinline__ float sum_over_fours(float (&value)[8]) {
  const unsigned lane = threadIdx.x % 32;
#pragma unroll
  for (int half = 4; half > 0; half /= 2) {
    const bool upper = (lane & (4 * half)) != 0;
#pragma unroll
    for (int i = 0; i < half; ++i) {
      const float mine = upper ? value[i + half] : value[i];
      const float theirs = upper ? value[i] : value[i + half];
      value[i] = mine + __shfl_xor_sync(0xffffffffu, theirs, 4 * half);
    }
  }
  return value[0];
}

// Sums of eight rows over a warp; lane l gets that of row l / 4.
__device__ __forceinline__ float sum_rows(float (&value)[8]) {
  return sum_of_four(sum_over_fours(value));
}

template <class In, NormKind kKind, int kRows>
class RowSums {
  static constexpr bool kCentered = kKind == NormKind::LayerNorm;

 public:
  // `memory`: norm_tiles_bytes(). First the ring, then the sums of each row's units for
  // `part_tiles` tiles.
  __device__ __forceinline__ RowSums(const Problem& problem, Shared& shared, uint8_t* memory)
      : p(problem),
        shared_(shared),
        ring_(problem, shared, memory),
        parts_(reinterpret_cast<float2*>(memory + problem.policy.slots * kStepElements *
                                                      int64_t{sizeof(In)})) {}

  __device__ __forceinline__ const Ring<In, kRows>& ring() const { return ring_; }

  // One thread calls it.
  __device__ __forceinline__ void init_barriers() const {
    const int senders = p.policy.cluster > 1 ? 1 : kWarps * p.policy.steps;
    for (int tile = 0; tile < p.policy.part_tiles; ++tile) {
      init_barrier(&shared_.summed[tile], static_cast<uint32_t>(senders));
      expect_parts(tile);
    }
  }

  // Sends the mean of this warp's columns, and the sum of squared deviations from it, to every
  // block of the cluster. (RMSNorm: 0 and the sum of squares.)
  __device__ __forceinline__ void send(const Step& step) const {
    ring_.wait(step);
    const float2 part = part_of(step);
    float2* to = parts_of_row(step) + ring_.unit(step);
    uint64_t* barrier = &shared_.summed[part_tile(step)];
    if (p.policy.cluster == 1) {
      if (ring_.lane() % 4 == 0) *to = part;
      __syncwarp();
      if (ring_.lane() == 0) arrive(barrier);
      return;
    }
#pragma unroll 1
    for (int rank = ring_.lane() % 4; rank < p.policy.cluster; rank += 4) {
      const auto block = static_cast<uint32_t>(rank);
      store_remote_async(remote_address(to, block), part, remote_address(barrier, block));
    }
  }

  // Computes mean and rstd of this warp's rows from the parts of all units, and writes them to
  // statistics().
  __device__ __forceinline__ void merge(const Step& step) const {
    const int tile = part_tile(step), units = ring_.units();
    // Other blocks have stored their parts in the shared memory of this block, where no cache can
    // hold older values: a wait at the scope of the block is enough.
    wait_barrier(&shared_.summed[tile], (step.tile & p.policy.part_tiles) != 0);
    if (step.of_tile == 0 && ring_.warp() == 0 && ring_.lane() == 0) expect_parts(tile);
    const float2* parts = parts_of_row(step);
    // Deviations are taken from the mean of the first part.
    const float pivot = kCentered ? parts[0].x : 0.0f;
    float sum = 0.0f, squares = 0.0f;
    int left = p.cols - ring_.lane() % 4 * kUnitCols;
#pragma unroll 4
    for (int unit = ring_.lane() % 4; unit < units; unit += 4, left -= 4 * kUnitCols) {
      const float2 part = parts[unit];
      squares += part.y;
      if constexpr (kCentered) {
        const float distance = part.x - pivot;
        const float weighted = static_cast<float>(max(min(left, kUnitCols), 0)) * distance;
        sum += weighted;
        squares += weighted * distance;
      }
    }
    squares = sum_of_four(squares);
    float mean = 0.0f;
    if constexpr (kCentered) {
      sum = sum_of_four(sum);
      mean = sum * p.inverse_cols;
      squares -= sum * mean;
      mean += pivot;
      if (squares < 0.0f) squares = 0.0f;
    }
    const float rstd = rsqrtf(squares * p.inverse_cols + p.epsilon);
    if (ring_.lane() % 4 == 0) {
      const int row = ring_.lane() / 4;
      statistics()[row] = {mean, rstd};
      if (ring_.unit(step) == 0 && row < ring_.rows(step)) {
        const int64_t at = ring_.row(step) + row;
        if constexpr (kCentered) p.mean[at] = mean;
        p.rstd[at] = rstd;
      }
    }
    __syncwarp();
  }
  // Mean and rstd of this warp's rows.
  __device__ __forceinline__ float2* statistics() const {
    return shared_.statistics[threadIdx.x / 32];
  }

 private:
  __device__ __forceinline__ int part_tile(const Step& step) const {
    return step.tile & (p.policy.part_tiles - 1);
  }
  __device__ __forceinline__ float2* parts_of_row(const Step& step) const {
    const int row = part_tile(step) * kRows + ring_.row_of_tile() + ring_.lane() / 4;
    return parts_ + row * ring_.units();
  }
  __device__ __forceinline__ void expect_parts(int tile) const {
    if (p.policy.cluster > 1)
      expect_bytes(&shared_.summed[tile],
                   static_cast<uint32_t>(kRows * ring_.units()) * sizeof(float2));
  }

  // Mean and squared deviations of this warp's columns in row lane / 4.
  __device__ __forceinline__ float2 part_of(const Step& step) const {
    Packed<In, 8> x[kUnitRows];  // zeros where there are no columns or rows
    const bool has = ring_.has_columns(step);
    const int rows = has ? ring_.rows(step) : 0;
#pragma unroll
    for (int r = 0; r < kUnitRows; ++r)
      if (r < rows) x[r].load(ring_.values(step, r));
    float mean = 0.0f, squares[kUnitRows];
    if constexpr (kCentered)
      mean = __fdividef(row_sums(x), static_cast<float>(max(ring_.columns(ring_.unit(step)), 1)));
#pragma unroll
    for (int r = 0; r < kUnitRows; ++r) {
      const float center = kCentered ? __shfl_sync(0xffffffffu, mean, 4 * r) : 0.0f;
      float values[8];
      x[r].convert(values);
      squares[r] = sum_of(values, [=](float value) {
        const float distance = kCentered ? value - center : value;
        return distance * distance;
      });
      if (kCentered && !has) squares[r] = 0.0f;
    }
    return {mean, sum_rows(squares)};
  }

  // The sum of row lane / 4 over the warp. Tensor cores add up 16-bit values, those of four lanes
  // at a time, by a product with ones.
  __device__ __forceinline__ float row_sums(const Packed<In, 8> (&x)[kUnitRows]) const {
    float sums[kUnitRows];
#pragma unroll
    for (int r = 0; r < kUnitRows; ++r) {
      if constexpr (sizeof(In) == 2) {
        constexpr uint32_t kOnes = std::is_same_v<In, Half> ? 0x3c003c00u : 0x3f803f80u;
        const auto& words = x[r].words;
        float product[4] = {};
        add_product<In>(product, words[0], words[1], words[2], words[3], kOnes, kOnes);
        sums[r] = product[0] + product[2];
      } else {
        float values[8];
        x[r].convert(values);
        sums[r] = sum_of(values, [](float value) { return value; });
      }
    }
    return sizeof(In) == 2 ? sum_over_fours(sums) : sum_rows(sums);
  }

  const Problem& p;
  Shared& shared_;
  Ring<In, kRows> ring_;
  float2* parts_;
};

}  // namespace te::cuda::norm_tiles
