// The ring of steps in norm_tiles.cu: which part of the matrix a block of the cluster, and each of
// its warps, handles in a step, and the copies that load it.
#pragma once

#include "cuda/device/async_copy.cuh"
#include "cuda/device/quantized_sink.cuh"
#include "cuda/device/tile_moments.cuh"
#include "cuda/policy/norm.h"
#include "ops/norm.h"

namespace te::cuda::norm_tiles {

constexpr int kGroups = kNormTileGroups;
constexpr int kWarps = 8;  // warps of a group
constexpr int kGroupThreads = 32 * kWarps;
constexpr int kThreads = kGroups * kGroupThreads;
constexpr int kUnitRows = 8;  // a warp's part of a step is 8 rows of 256 columns
constexpr int kUnitCols = kNormTileUnitCols;
static_assert(kWarps * kUnitRows * kUnitCols == kStepElements);

struct Problem {
  const void* x = nullptr;
  const void* gamma = nullptr;
  const void* beta = nullptr;
  DType gamma_dtype = DType::Float32;
  float gamma_offset = 0.0f;  // 1 with a zero-centred gamma
  float epsilon = 0.0f;
  float inverse_cols = 0.0f;
  int64_t rows = 0;
  int cols = 0;
  int tiles = 0;
  NormTilesPolicy policy;
  void* y = nullptr;  // in the dtype of x
  bool e5m2 = false;
  QuantizedSink fp8;
  float* mean = nullptr;
  float* rstd = nullptr;
  TileMomentsSink moments = {};
};

struct Shared {
  uint64_t arrived[kNormTileSlots][kWarps];  // complete when a warp's part of a step is loaded
  uint64_t summed[kNormPartTiles];           // complete when all sums of a tile are there
  float2 statistics[kGroups * kWarps][kUnitRows];  // mean and rstd of a warp's rows
  float amaxes[kGroups * kWarps];
};

// A step of this block: the tile, counted among those of the cluster; the number of the step in the
// tile; the slot of the ring, and how often the ring has wrapped around, modulo 2.
struct Step {
  int tile = 0, of_tile = 0, slot = 0;
  uint32_t phase = 0;

  // The step that follows `count` steps later.
  __device__ __forceinline__ Step plus(int count, const NormTilesPolicy& policy) const {
    Step next{tile, of_tile + count, slot + count, phase};
    for (; next.of_tile >= policy.steps; next.of_tile -= policy.steps) ++next.tile;
    for (; next.slot >= policy.slots; next.slot -= policy.slots) next.phase ^= 1;
    return next;
  }
};

// The ring as one warp sees it: 8 rows and 256 columns of every second step.
template <class In, int kRows>
class Ring {
 public:
  static constexpr int kRowGroups = kRows / kUnitRows;
  static constexpr int kColumnWarps = kWarps / kRowGroups;

  __device__ __forceinline__ Ring(const Problem& problem, Shared& shared, void* memory)
      : p(problem),
        shared_(shared),
        values_(static_cast<In*>(memory)),
        lane_(static_cast<int>(threadIdx.x) % 32),
        warp_(static_cast<int>(threadIdx.x) / 32 % kWarps),
        rank_(static_cast<int>(blockIdx.x) % problem.policy.cluster),
        cluster_(static_cast<int>(blockIdx.x) / problem.policy.cluster),
        clusters_(static_cast<int>(gridDim.x) / problem.policy.cluster) {}

  __device__ __forceinline__ static int group() {
    return static_cast<int>(threadIdx.x) / kGroupThreads;
  }
  __device__ __forceinline__ int lane() const { return lane_; }
  __device__ __forceinline__ int warp() const { return warp_; }  // number in the group

  // The first step of this warp's group, the next one, and whether a step exists.
  __device__ __forceinline__ Step first() const { return Step{}.plus(group(), p.policy); }
  __device__ __forceinline__ Step next(const Step& step) const {
    return step.plus(kGroups, p.policy);
  }
  __device__ __forceinline__ bool exists(const Step& step) const {
    return cluster_ + step.tile * clusters_ < p.tiles;
  }

  __device__ __forceinline__ int64_t tile_row(const Step& step) const {
    return (cluster_ + int64_t{step.tile} * clusters_) * kRows;
  }
  // This warp's rows: where they begin within the tile, within the matrix, and how many exist.
  __device__ __forceinline__ int row_of_tile() const { return warp_ % kRowGroups * kUnitRows; }
  __device__ __forceinline__ int64_t row(const Step& step) const {
    return tile_row(step) + row_of_tile();
  }
  __device__ __forceinline__ int rows(const Step& step) const {
    return static_cast<int>(max(min(p.rows - row(step), int64_t{kUnitRows}), int64_t{0}));
  }
  // The number of the warp's unit of 256 columns, in a row that the blocks of the cluster share.
  __device__ __forceinline__ int unit(const Step& step) const {
    return (rank_ * p.policy.steps + step.of_tile) * kColumnWarps + warp_ / kRowGroups;
  }
  __device__ __forceinline__ int units() const {
    return p.policy.cluster * p.policy.steps * kColumnWarps;
  }
  // The number of columns of a unit that exist.
  __device__ __forceinline__ int columns(int unit) const {
    return max(min(p.cols - unit * kUnitCols, kUnitCols), 0);
  }
  // Whether the lane's eight columns exist, and the first of them.
  __device__ __forceinline__ bool has_columns(const Step& step) const {
    return lane_ * 8 < columns(unit(step));
  }
  __device__ __forceinline__ int column(const Step& step) const {
    return unit(step) * kUnitCols + lane_ * 8;
  }

  // The memory of a step, and in it the lane's values in row r of this warp.
  __device__ __forceinline__ In* values(const Step& step) const {
    return values_ + int64_t{step.slot} * kStepElements;
  }
  __device__ __forceinline__ In* values(const Step& step, int r) const {
    return values(step) + (warp_ * kUnitRows + r) * kUnitCols + lane_ * 8;
  }

  // All threads of the block call it, before anything else.
  __device__ __forceinline__ void init_barriers() const {
    constexpr int kCopying = 32;
    if (group() != 0 || lane_ != 0) return;
    for (int slot = 0; slot < p.policy.slots; ++slot)
      init_barrier(&shared_.arrived[slot][warp_], kCopying);
  }

  __device__ __forceinline__ void fill() const {
    for (Step step = first(); step.phase == 0 && exists(step); step = next(step)) load(step);
  }
  // Loads the next step that uses the memory of `step`. The group must have read that memory.
  __device__ __forceinline__ void refill(const Step& step) const {
    const Step coming = step.plus(p.policy.slots, p.policy);
    if (exists(coming)) load(coming);
  }
  __device__ __forceinline__ void wait(const Step& step) const {
    wait_barrier(&shared_.arrived[step.slot][warp_], step.phase);
  }

 private:
  // Each lane copies its own columns. A bulk copy for each row of a warp would take more
  // instructions than these copies.
  __device__ __forceinline__ void load(const Step& step) const {
    const int rows = has_columns(step) ? this->rows(step) : 0;
    const In* from = static_cast<const In*>(p.x) + row(step) * p.cols + column(step);
    const uint32_t to = shared_address(values(step, 0));
    constexpr int kRowBytes = kUnitCols * static_cast<int>(sizeof(In));
#pragma unroll
    for (int r = 0; r < kUnitRows; ++r, from += p.cols) {
      if (r >= rows) continue;
      copy_16_bytes(to + r * kRowBytes, from);
      if constexpr (sizeof(In) == 4) copy_16_bytes(to + r * kRowBytes + 16, from + 4);
    }
    arrive_with_copies(&shared_.arrived[step.slot][warp_]);
  }

  const Problem& p;
  Shared& shared_;
  In* values_;
  int lane_, warp_, rank_, cluster_, clusters_;
};

}  // namespace te::cuda::norm_tiles
