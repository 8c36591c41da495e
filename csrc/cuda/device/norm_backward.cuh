// The work of a block in norm_backward.cu. A batch has one row for each group of threads. A thread
// handles the same columns in all batches, so that it sums dgamma and dbeta of these columns in
// registers. For each batch,
//   pass 1 adds to dgamma and dbeta and computes the two means that dx needs,
//   pass 2 reads the values again and writes dx.
// Asynchronous copies bring the batches into shared memory, a few batches ahead. The sums of a row
// are combined in shared memory: within a block after a barrier, within a cluster after
// asynchronous stores by which the blocks send their sums to each other.
#pragma once

#include "cuda/device/cluster.cuh"
#include "cuda/device/dependent_launch.cuh"
#include "cuda/device/norm_row.cuh"
#include "cuda/norm_backward_problem.h"
#include "cuda/policy/norm.h"

namespace te::cuda::norm_batches {

constexpr int kMaxSlots = static_cast<int>(kBackwardThreads / 32 * kMaxCluster);

struct Problem : NormBackwardProblem {
  int cluster = 0;
  int width = 0;  // columns of one block
  int stages = 0;
};

// Shared memory of a block besides the stages, each of which holds a batch.
struct Shared {
  uint64_t arrived[kBackwardStages];  // complete when the copies into a stage are
  uint64_t summed[2];                 // complete when the sums of a batch are there; used in turn
  // For each group of threads, the sums of each of its warps in each block of the cluster: {sum of
  // g dy xhat, sum of g dy}, where g is gamma. Groups times warps is at most the number of warps of
  // a block.
  float2 slots[2][kMaxSlots];
};

template <class In, class Gradient, NormKind kKind, int kPacks>
class Worker {
  static constexpr bool kCentered = kKind == NormKind::LayerNorm;
  static constexpr int kWidth = sizeof(In) + sizeof(Gradient) == 4 ? 8 : 4;  // values of a pack

 public:
  // `memory`: shared memory for the stages, followed by gamma in fp32.
  __device__ __forceinline__ Worker(const Problem& problem, Shared& shared, uint8_t* memory)
      : p(problem),
        shared_(shared),
        stages_(memory),
        gamma_(reinterpret_cast<float*>(memory + p.stages * stage_bytes())),
        rank_(static_cast<int>(blockIdx.x % static_cast<unsigned>(p.cluster))),
        columns_(min(p.cols - rank_ * p.width, p.width)) {}

  __device__ __forceinline__ void run() {
    const int clusters = static_cast<int>(gridDim.x) / p.cluster;
    const int batches = (p.rows + groups() - 1) / groups();
    const int first = static_cast<int>(blockIdx.x) / p.cluster;
    init_barriers();
    // Gamma is loaded before the copies of later batches are started, which are less urgent. The
    // blocks of a cluster meet before they start any copy, because a barrier of the cluster would
    // wait for the copies.
    const int early = p.cluster == 1 ? 1 : 0;
    if (early && first < batches) fetch(first, 0);
    load_statistics(first);
    load_gamma();
    if (!early) meet();
    for (int i = early; i < p.stages; ++i)
      if (first + i * clusters < batches) fetch(first + i * clusters, i);
    if (early) meet();
    int stage = 0, turn = 0;
    uint32_t stage_phase = 0, turn_phase = 0;
    for (int batch = first; batch < batches; batch += clusters) {
      const float mean = next_mean_, rstd = next_rstd_;
      load_statistics(batch + clusters);
      wait_barrier(&shared_.arrived[stage], stage_phase);
      const bool has_row = batch * groups() + group() < p.rows;
      float2 sums{0.0f, 0.0f};
      if (has_row) sums = add_row(stage, mean, rstd);
      sums = sum_over_cluster(sums, turn, turn_phase);
      // All threads have finished the previous batch, so its stage can take the next one to load.
      const int coming = batch + (p.stages - 1) * clusters;
      if (batch != first && coming < batches) fetch(coming, stage == 0 ? p.stages - 1 : stage - 1);
      if (has_row) write_row(stage, batch * groups() + group(), mean, rstd, sums);
      turn ^= 1;
      if (turn == 0) turn_phase ^= 1;
      if (++stage == p.stages) {
        stage = 0;
        stage_phase ^= 1;
      }
    }
    write_partials(first);
  }

 private:
  __device__ __forceinline__ static int thread() { return static_cast<int>(threadIdx.x); }
  __device__ __forceinline__ static int row_threads() { return static_cast<int>(blockDim.x); }
  __device__ __forceinline__ static int group() { return static_cast<int>(threadIdx.y); }
  __device__ __forceinline__ static int groups() { return static_cast<int>(blockDim.y); }

  // A stage holds `groups` rows of x, then of dy, then of the residual gradient.
  __device__ __forceinline__ int x_bytes() const {
    return groups() * p.width * static_cast<int>(sizeof(In));
  }
  __device__ __forceinline__ int dy_bytes() const {
    return groups() * p.width * static_cast<int>(sizeof(Gradient));
  }
  __device__ __forceinline__ int stage_bytes() const {
    return x_bytes() * (p.residual_grad ? 2 : 1) + dy_bytes();
  }
  // Pack j of this thread starts at column(j) of the block's columns, if has(j).
  __device__ __forceinline__ static int column(int j) {
    return (thread() + j * row_threads()) * kWidth;
  }
  __device__ __forceinline__ bool has(int j) const { return column(j) < columns_; }

  template <class T>
  __device__ __forceinline__ void read(int stage, int offset, int j,
                                       float (&values)[kWidth]) const {
    const uint8_t* row =
        stages_ + stage * stage_bytes() + offset + group() * p.width * static_cast<int>(sizeof(T));
    load_values<T>(row + column(j) * static_cast<int>(sizeof(T)), values);
  }

  // The warp that starts the copies initialises the barriers.
  __device__ __forceinline__ void init_barriers() const {
    if (group() != 0 || thread() >= 32) return;
    if (thread() == 0) {
      for (int i = 0; i < p.stages; ++i) init_barrier(&shared_.arrived[i]);
      for (auto& barrier : shared_.summed) init_barrier(&barrier);
    }
    __syncwarp();
  }

  __device__ __forceinline__ void load_gamma() const {
    const int threads = row_threads() * groups();
    for (int col = group() * row_threads() + thread(); col < columns_; col += threads) {
      with_dtype(p.gamma_dtype, [&](auto tag) {
        using T = typename decltype(tag)::type;
        const T value = static_cast<const T*>(p.gamma)[rank_ * p.width + col];
        *gamma_at(col) = static_cast<float>(value) + p.gamma_offset;
      });
    }
  }

  // A barrier of the whole cluster. After it all threads see gamma and the initialised mbarriers.
  __device__ __forceinline__ void meet() const {
    __syncthreads();
    if (p.cluster == 1) return;
    cluster_arrive();
    cluster_wait();
  }

  // Gamma is stored in quads of four values: the first quads of all packs, then the second ones, so
  // that neighbouring threads read neighbouring quads.
  __device__ __forceinline__ float* gamma_at(int col) const {
    const int pack = col / kWidth, quad = col % kWidth / 4;
    return gamma_ + (quad * (p.width / kWidth) + pack) * 4 + col % 4;
  }
  __device__ __forceinline__ void read_gamma(int j, float (&gamma)[kWidth]) const {
#pragma unroll
    for (int k = 0; k < kWidth; k += 4) {
      float quad[4];
      load_values<float>(gamma_at(column(j) + k), quad);
#pragma unroll
      for (int i = 0; i < 4; ++i) gamma[k + i] = quad[i];
    }
  }

  // Loads the statistics of this thread's row in a batch. If there is no such row, those of the
  // last row are loaded and never used.
  __device__ __forceinline__ void load_statistics(int batch) {
    const int row = min(batch * groups() + group(), p.rows - 1);
    if constexpr (kCentered) next_mean_ = p.mean[row];
    next_rstd_ = p.rstd[row];
  }

  // One warp starts the copies of a batch into a stage. Whole rows are contiguous, so that each
  // tensor is one copy. If blocks share rows, each row of a tensor is one copy.
  __device__ __forceinline__ void fetch(int batch, int stage) const {
    if (group() != 0 || thread() >= 32) return;
    const int row = batch * groups(), rows = min(p.rows - row, groups());
    const int pieces = p.cluster == 1 ? 1 : rows, tensors = p.residual_grad ? 3 : 2;
    const int count = p.cluster == 1 ? rows * columns_ : columns_;
    uint64_t* barrier = &shared_.arrived[stage];
    if (thread() == 0) {
      const auto element = sizeof(Gradient) + sizeof(In) * static_cast<unsigned>(tensors - 1);
      expect_bytes(barrier, static_cast<uint32_t>(pieces * count * element));
    }
    __syncwarp();
    uint8_t* to = stages_ + stage * stage_bytes();
    start_copies(pieces * tensors, barrier, [&](int i) -> CopyPiece {
      const int tensor = i / pieces, r = i % pieces;
      const bool is_dy = tensor == 1;
      const int element = static_cast<int>(is_dy ? sizeof(Gradient) : sizeof(In));
      const int place = tensor == 0 ? 0 : is_dy ? x_bytes() : x_bytes() + dy_bytes();
      const void* from = tensor == 0 ? p.x : is_dy ? p.dy : p.residual_grad;
      const int64_t index = int64_t{row + r} * p.cols + rank_ * p.width;
      return {to + place + r * p.width * element,
              static_cast<const uint8_t*>(from) + index * element,
              static_cast<uint32_t>(count * element)};
    });
  }

  // x - mean (LayerNorm) or x (RMSNorm), dy and gamma of pack j.
  struct Terms {
    float x[kWidth], dy[kWidth], gamma[kWidth];
  };
  __device__ __forceinline__ Terms terms(int stage, int j, float mean) const {
    Terms t;
    read<In>(stage, 0, j, t.x);
    read<Gradient>(stage, x_bytes(), j, t.dy);
    read_gamma(j, t.gamma);
    if constexpr (kCentered) {
#pragma unroll
      for (int k = 0; k < kWidth; ++k) t.x[k] -= mean;
    }
    return t;
  }

  __device__ __forceinline__ float2 add_row(int stage, float mean, float rstd) {
    float2 sums{0.0f, 0.0f};
#pragma unroll
    for (int j = 0; j < kPacks; ++j) {
      if (!has(j)) continue;
      const Terms t = terms(stage, j, mean);
#pragma unroll
      for (int k = 0; k < kWidth; ++k) {
        const float product = t.dy[k] * (t.x[k] * rstd);
        dgamma_[j][k] += product;
        sums.x += product * t.gamma[k];
        if constexpr (kCentered) {
          dbeta_[j][k] += t.dy[k];
          sums.y += t.dy[k] * t.gamma[k];
        }
      }
    }
    return sums;
  }

  // Finishes two sums over a warp by one tree of shuffles: the lower 16 lanes hold terms of the
  // first sum, the upper 16 those of the second. All lanes get both.
  __device__ __forceinline__ static float2 finish_sums(float half) {
#pragma unroll
    for (int offset = 8; offset > 0; offset /= 2)
      half += __shfl_xor_sync(0xffffffffu, half, offset);
    return {__shfl_sync(0xffffffffu, half, 0), __shfl_sync(0xffffffffu, half, 16)};
  }
  __device__ __forceinline__ static float2 sum_over_warp(float2 sums) {
    if constexpr (!kCentered) return {warp_reduce(sums.x, Sum{}), 0.0f};
    const bool upper = thread() % 32 >= 16;
    const float other = __shfl_xor_sync(0xffffffffu, upper ? sums.x : sums.y, 16);
    return finish_sums((upper ? sums.y : sums.x) + other);
  }

  // Returns the sums over all threads of the group, in all blocks of the cluster. It is also a
  // barrier: no thread returns before all have called it.
  __device__ __forceinline__ float2 sum_over_cluster(float2 sums, int turn, uint32_t phase) const {
    sums = sum_over_warp(sums);
    const int warps = row_threads() / 32, lane = thread() % 32;
    const int count = warps * p.cluster;
    float2* slots = shared_.slots[turn] + group() * count;
    float2* mine = slots + rank_ * warps + thread() / 32;
    if (p.cluster == 1) {
      if (lane == 0) *mine = sums;
      __syncthreads();
    } else {
      if (group() == 0 && thread() == 0)
        expect_bytes(&shared_.summed[turn],
                     static_cast<uint32_t>(groups() * count * static_cast<int>(sizeof(float2))));
      if (lane < p.cluster)
        store_remote_async(remote_address(mine, static_cast<uint32_t>(lane)), sums,
                           remote_address(&shared_.summed[turn], static_cast<uint32_t>(lane)));
      wait_cluster_barrier(&shared_.summed[turn], phase);
    }
    float half = 0.0f;
#pragma unroll 1
    for (int slot = lane % 16; slot < count; slot += 16)
      half += lane < 16 ? slots[slot].x : slots[slot].y;
    return finish_sums(half);
  }

  // dx = rstd (g dy - mean of g dy - xhat * mean of g dy xhat).
  __device__ __forceinline__ void write_row(int stage, int row, float mean, float rstd,
                                            float2 sums) const {
    const float along = sums.x * p.inverse_cols * rstd * rstd;
    const float offset = sums.y * p.inverse_cols * rstd;
    In* dx = static_cast<In*>(p.dx) + int64_t{row} * p.cols + rank_ * p.width;
#pragma unroll
    for (int j = 0; j < kPacks; ++j) {
      if (!has(j)) continue;
      const Terms t = terms(stage, j, mean);
      float values[kWidth];
#pragma unroll
      for (int k = 0; k < kWidth; ++k) {
        values[k] = kCentered ? -offset - t.x[k] * along : -(t.x[k] * along);
        values[k] += t.dy[k] * t.gamma[k] * rstd;
      }
      if (p.residual_grad) {
        float residual[kWidth];
        read<In>(stage, x_bytes() + dy_bytes(), j, residual);
#pragma unroll
        for (int k = 0; k < kWidth; ++k) values[k] += residual[k];
      }
      store_values<In>(dx + column(j), values);
    }
  }

  // Writes the block's sums of dgamma and dbeta. The groups store their sums in shared memory, over
  // the stages; then each thread adds up a few columns, in the order of the groups.
  __device__ __forceinline__ void write_partials(int cluster) const {
    constexpr int kVectors = kCentered ? 2 : 1;
    float* sums = reinterpret_cast<float*>(stages_);
    const int pitch = kVectors * p.width;  // from group to group
    __syncthreads();
    leave(dgamma_, sums + group() * pitch);
    if constexpr (kCentered) leave(dbeta_, sums + group() * pitch + p.width);
    __syncthreads();
    float* out = p.partials + int64_t{cluster} * 2 * p.cols + rank_ * p.width;
    const int threads = row_threads() * groups(), quads = columns_ / 4;
#pragma unroll 1
    for (int i = group() * row_threads() + thread(); i < kVectors * quads; i += threads) {
      const int vector = i / quads, col = i % quads * 4;
      float total[4] = {};
#pragma unroll 4
      for (int g = 0; g < groups(); ++g) {
        float values[4];
        load_values<float>(sums + g * pitch + vector * p.width + col, values);
#pragma unroll
        for (int k = 0; k < 4; ++k) total[k] += values[k];
      }
      store_values<float>(out + int64_t{vector} * p.cols + col, total);
    }
  }
  __device__ __forceinline__ void leave(const float (&sums)[kPacks][kWidth], float* to) const {
#pragma unroll
    for (int j = 0; j < kPacks; ++j) {
      if (!has(j)) continue;
#pragma unroll
      for (int k = 0; k < kWidth; k += 4)
        store_pack(to + column(j) + k,
                   Pack<float, 4>{sums[j][k], sums[j][k + 1], sums[j][k + 2], sums[j][k + 3]});
    }
  }

  const Problem& p;
  Shared& shared_;
  uint8_t* stages_;
  float* gamma_;
  int rank_, columns_;
  float next_mean_ = 0.0f, next_rstd_ = 0.0f;
  float dgamma_[kPacks][kWidth] = {};
  float dbeta_[kPacks][kWidth] = {};  // unused in RMSNorm, and then in no register
};

}  // namespace te::cuda::norm_batches
