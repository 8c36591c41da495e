// The work of a warp in norm_tiles.cu. The kernel is persistent: a cluster of blocks takes one tile
// of whole rows after another. Each block has some columns of the tile. It handles them in one step
// or several, each by one of the two groups of warps of the block, in turn. Shared memory is a ring
// of steps, which copies refill while other steps are computed.
//   1. A warp waits for its 8 rows and 256 columns of a step, computes mean and sum of squares of
//      each row's part, and sends them to all blocks of the cluster. If there is room, it does so
//      one step ahead, so that no warp waits for the sums of others.
//   2. It merges the parts of its rows once those of all warps of the cluster have arrived.
//   3. It reads its values again, writes row-wise codes from registers, and puts the codes into a
//      CodeTile, which overwrites the values that its group has read. The group writes the columns
//      of that tile and refills the step.
// A lane has 8 x 8 values of a step, the block that CodeTile takes.
#pragma once

#include "cuda/device/dependent_launch.cuh"
#include "cuda/device/float8.cuh"
#include "cuda/device/norm_tiles_sums.cuh"
#include "cuda/device/pack_io.cuh"
#include "cuda/device/tile_transpose.cuh"

namespace te::cuda::norm_tiles {

// Hides the origin of a number from the compiler, so that what is computed from it stays inside the
// loop. Otherwise addresses that are the same in all steps would fill the registers.
__device__ __forceinline__ int opaque(int value) {
  asm volatile("" : "+r"(value));
  return value;
}

// Gamma and beta of a lane's 8 columns.
struct Affine {
  float gamma[8], beta[8];
};

// What one warp does with its 8 rows and its columns of each step.
template <class In, NormKind kKind, int kRows>
class Worker {
  static constexpr int kRowGroups = Ring<In, kRows>::kRowGroups;
  static constexpr int kColumnWarps = Ring<In, kRows>::kColumnWarps;
  static constexpr bool kCentered = kKind == NormKind::LayerNorm;
  using Tile = CodeTile<kRows, kUnitCols>;
  static_assert(kColumnWarps * Tile::kBytes <= kStepElements * static_cast<int>(sizeof(In)));

 public:
  // `memory`: shared memory, norm_tiles_bytes().
  __device__ __forceinline__ Worker(const Problem& problem, Shared& shared, uint8_t* memory)
      : p(problem), sums_(problem, shared, memory) {}

  // All threads of the block call it.
  __device__ __forceinline__ void init_barriers() const {
    ring().init_barriers();
    if (threadIdx.x == 0) sums_.init_barriers();
    __syncthreads();
    if (p.policy.cluster > 1) cluster_arrive();
  }

  // Returns the amax of this lane's results.
  template <class Gathered>
  __device__ __forceinline__ float run(Gathered& moments) const {
    ring().fill();
    const float scale = p.fp8.scale_used(blockIdx.x == 0 && threadIdx.x == 0);
    if (p.policy.cluster > 1) cluster_wait();  // all blocks have initialised their barriers
    const int ahead = p.policy.ahead ? 1 : 0;
    int sent = 0, written = 0;
    float amax = 0.0f;
    Step unsent = ring().first();
    for (Step step = ring().first(); ring().exists(step); step = ring().next(step), ++written) {
      // All sums of a tile are sent before this warp waits for those of others.
      for (; ring().exists(unsent) && (sent <= written + ahead || unsent.tile == step.tile);
           ++sent) {
        sums_.send(unsent);
        unsent = ring().next(unsent);
      }
      const Affine affine = load_affine(step);  // these loads run while it waits for sums
      sums_.merge(step);
      amax = fmaxf(amax, write_results(step, scale, affine, moments));
      ring().refill(step);
    }
    return amax;
  }

  // Returns the moments of the warp's results. Rows must be whole units of 256 columns.
  __device__ __forceinline__ MomentSums moments(const PackedMoments<In, double>& gathered) const {
    MomentSums sums = gathered.warp_sums();
    if (!gathered.is_exact(sums)) sums = exact_moments();
    return sums;
  }

 private:
  template <class Gathered>
  __device__ __forceinline__ float write_results(const Step& step, float scale,
                                                 const Affine& affine, Gathered& moments) const {
    CodeBlock codes;
    float amax = 0.0f;
    if (ring().has_columns(step)) {
      if (p.y) write_plain(step, affine);
      amax = p.e5m2 ? write_codes<E5M2>(step, scale, affine, codes, moments)
                    : write_codes<E4M3>(step, scale, affine, codes, moments);
    }
    if (p.fp8.columnwise)
      write_columns(step, codes);
    else
      __syncwarp();
    return amax;
  }

  __device__ __forceinline__ Affine load_affine(const Step& step) const {
    Affine affine{};
    if (!ring().has_columns(step)) return affine;
    const int col = ring().column(step);
    with_dtype(p.gamma_dtype, [&](auto tag) {
      using T = typename decltype(tag)::type;
      load_values<T>(static_cast<const T*>(p.gamma) + col, affine.gamma);
      if constexpr (kCentered) load_values<T>(static_cast<const T*>(p.beta) + col, affine.beta);
    });
#pragma unroll
    for (int k = 0; k < 8; ++k) affine.gamma[k] += p.gamma_offset;
    return affine;
  }

  __device__ __forceinline__ void normalise(float2 statistics, const Affine& affine,
                                            float (&y)[8]) const {
    const Standardised standardised(statistics.x, statistics.y);
#pragma unroll
    for (int k = 0; k < 8; ++k) {
      if constexpr (!kCentered)
        y[k] *= statistics.y;
      else if constexpr (sizeof(In) == 2)
        y[k] = standardised(y[k]);
      else
        y[k] = (y[k] - statistics.x) * statistics.y;
      y[k] *= affine.gamma[k];
      if constexpr (kCentered) y[k] += affine.beta[k];
    }
  }

  template <class Fp8, class Gathered>
  __device__ __forceinline__ float write_codes(const Step& step, float scale, const Affine& affine,
                                               CodeBlock& codes, Gathered& moments) const {
    const int rows = ring().rows(step);
    uint8_t* to = p.fp8.rowwise + ring().row(step) * p.cols + ring().column(step);
    const int stored = p.fp8.rowwise ? rows : 0;
    float amax = 0.0f;
    // All rows are read before any is written: the compiler cannot tell that the stores do not
    // change what is read.
    Packed<In, 8> x[kUnitRows];
#pragma unroll
    for (int r = 0; r < kUnitRows; ++r) x[r].load(ring().values(step, r));
#pragma unroll
    for (int r = 0; r < kUnitRows; ++r, to += p.cols) {
      float y[8];
      x[r].convert(y);
      normalise(sums_.statistics()[r], affine, y);
      codes.rows[r] = encode8<Fp8>(y, scale);
      if (r < stored) *reinterpret_cast<uint2*>(to) = codes.rows[r];
      float of_row = fabsf(y[0]);
#pragma unroll
      for (int k = 1; k < 8; ++k) of_row = fmaxf(of_row, fabsf(y[k]));
      if (r < rows) amax = fmaxf(amax, of_row);
      if constexpr (kTakesMoments<Gathered>) {
        if (r < rows) moments.add(rounded_octet<In>(y));
        if ((r + 1) % Gathered::kLongest == 0) moments.fold();
      }
    }
    return amax;
  }

  // Returns the moments of the warp's results, summed in fp64. The ring holds other steps by now,
  // so x is read from global memory again. A barrier of the cluster must come first, because its
  // blocks have written mean and rstd.
  __device__ __forceinline__ MomentSums exact_moments() const {
    MomentSums sums = MomentSums::empty();
    for (Step step = ring().first(); ring().exists(step); step = ring().next(step)) {
      if (!ring().has_columns(step)) continue;
      const int rows = ring().rows(step);
      const Affine affine = load_affine(step);
      float y[8];
#pragma unroll 1
      for (int r = 0; r < rows; ++r) {
        const int64_t row = ring().row(step) + r;
        load_values<In>(static_cast<const In*>(p.x) + row * p.cols + ring().column(step), y);
        normalise({kCentered ? p.mean[row] : 0.0f, p.rstd[row]}, affine, y);
#pragma unroll
        for (int k = 0; k < 8; ++k) sums.add(static_cast<double>(static_cast<float>(In(y[k]))), 0);
      }
    }
    return warp_add(sums);
  }

  // Writes y in the dtype of x. write_codes computes the same values again: few calls ask for both.
  __device__ __forceinline__ void write_plain(const Step& step, const Affine& affine) const {
    const int rows = ring().rows(step);
    In* to = static_cast<In*>(p.y) + ring().row(step) * p.cols + ring().column(step);
    float y[8];
#pragma unroll 1
    for (int r = 0; r < rows; ++r, to += p.cols) {
      load_values<In>(ring().values(step, r), y);
      normalise(sums_.statistics()[r], affine, y);
      store_values<In>(to, y);
    }
  }

  // Writes the codes of a step by columns. All threads of the group call it. The tile of codes
  // overwrites the values of this step, which no thread reads any more after the first barrier.
  __device__ __forceinline__ void write_columns(const Step& step, const CodeBlock& codes) const {
    const int thread = opaque(static_cast<int>(threadIdx.x) % kGroupThreads);
    auto* memory = reinterpret_cast<uint8_t*>(ring().values(step));
    const Tile tile(memory + thread / (32 * kRowGroups) * Tile::kBytes);
    sync_group();
    if (ring().has_columns(step)) tile.put(ring().row_of_tile(), thread % 32 * 8, codes);
    sync_group();
    const int64_t row = ring().tile_row(step);
    const int unit = ring().unit(step);
    const TileTarget target{
        p.fp8.columnwise + int64_t{unit} * kUnitCols * p.rows + row, p.rows,
        static_cast<int>(min(p.rows - row, int64_t{kRows})), ring().columns(unit),
        p.rows % 16 == 0 && reinterpret_cast<uintptr_t>(p.fp8.columnwise) % 16 == 0};
    constexpr int kStoring = kGroupThreads / kColumnWarps;
    tile.template store<kStoring>(target, static_cast<unsigned>(thread) % kStoring);
    sync_group();
  }
  __device__ __forceinline__ const Ring<In, kRows>& ring() const { return sums_.ring(); }
  __device__ __forceinline__ void sync_group() const {
    asm volatile("bar.sync %0, %1;" ::"r"(1 + Ring<In, kRows>::group()), "n"(kGroupThreads)
                 : "memory");
  }

  const Problem& p;
  RowSums<In, kKind, kRows> sums_;
};

template <class In, NormKind kKind, int kRows, bool kMoments>
__global__ void __launch_bounds__(kThreads, 1) tile_kernel(const __grid_constant__ Problem p) {
  extern __shared__ __align__(128) uint8_t memory[];
  __shared__ norm_tiles::Shared shared;
  [[maybe_unused]] __shared__ TileMoments<kGroups * kWarps> moments;
  const Worker<In, kKind, kRows> worker(p, shared, memory);
  worker.init_barriers();
  follow_previous_kernel();
  GatheredMoments<In, kMoments, double> gathered;
  const float amax = warp_reduce(worker.run(gathered), Max{});
  const int warp = static_cast<int>(threadIdx.x) / 32;
  if constexpr (kMoments) {
    cluster_arrive();
    cluster_wait();
    if (p.moments) moments.leave(worker.moments(gathered));
  } else {
    if (!p.fp8.amax) return;
  }
  if (threadIdx.x % 32 == 0) shared.amaxes[warp] = amax;
  __syncthreads();
  if constexpr (kMoments) {
    if (warp == kGroups * kWarps - 1 && p.moments)
      moments.finish(p.moments, static_cast<int>(blockIdx.x));
  }
  if (threadIdx.x != 0 || !p.fp8.amax) return;
  float block_amax = amax;
  for (const float of_warp : shared.amaxes) block_amax = fmaxf(block_amax, of_warp);
  atomic_max(p.fp8.amax, block_amax);
}

}  // namespace te::cuda::norm_tiles
