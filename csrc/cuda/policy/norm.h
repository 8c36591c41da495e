// Launch parameters of the norm kernels. Plain arithmetic without CUDA, so that a CPU test can
// check it (norm_policy_test.cpp).
#pragma once

#include <algorithm>
#include <cstdint>

#include "cuda/policy/device_limits.h"

namespace te::cuda {

constexpr int64_t round_up(int64_t value, int64_t multiple) {
  return (value + multiple - 1) / multiple * multiple;
}

// Forward with a row in registers. A pack is 16 bytes of x; a thread holds up to `packs` of them:
// enough loads in flight, and so few threads per row that summing over them stays cheap.
struct NormRowsPolicy {
  int threads = 0;  // per row: 8, 16 or whole warps; 0: the row does not fit
  int rows = 1;     // per block
  int packs = 4;    // per thread
};

constexpr NormRowsPolicy norm_rows_policy(int64_t packs_per_row) {
  for (const int threads : {8, 16, 32})
    if (packs_per_row <= threads) return {.threads = threads, .rows = 128 / threads, .packs = 1};
  if (packs_per_row <= 128) return {.threads = 32, .rows = 4, .packs = 4};
  const int64_t threads = round_up((packs_per_row + 3) / 4, 32);
  if (threads > 1024) return {};
  return {.threads = static_cast<int>(threads), .rows = 1, .packs = 4};
}

// The number of blocks for a grid whose blocks loop over `items`: the fewest that need no more
// rounds than `resident` blocks would, so that no block runs alone at the end.
constexpr int64_t balanced_grid(int64_t items, int64_t resident) {
  if (items <= resident) return std::max<int64_t>(items, 1);
  const int64_t rounds = (items + resident - 1) / resident;
  return (items + rounds - 1) / rounds;
}

// Forward to FP8 with a transposed result, by persistent clusters of blocks that take tile after
// tile of `rows` rows. A block's part of a tile is `steps` steps of 16 Ki / rows columns. Its ring
// holds `slots` steps, and partial sums are kept for `part_tiles` tiles. With 64 rows, transposed
// stores write half cache lines, with 32 rows whole sectors.
struct NormTilesPolicy {
  int rows = 0;  // 0: the row does not fit
  int steps = 0;
  int cluster = 0;
  int slots = 0;
  int part_tiles = 0;  // a power of two
  bool ahead = false;  // sums are sent one step before results are written
};

inline constexpr int64_t kStepElements = 16384;
inline constexpr int kNormTileUnitCols = 256;  // columns of a row that one warp sums
inline constexpr int kNormTileGroups = 2;  // groups of warps of a block, which take steps in turn
inline constexpr int kNormTileSlots = 6;
inline constexpr int kNormPartTiles = 8;
inline constexpr int64_t kTileReserve = 4 << 10;  // barriers, statistics, moments

// Returns for how many tiles partial sums are kept. The sums of a tile overwrite those of
// `part_tiles` tiles before, which all blocks of the cluster must have merged by then. A tile has
// `steps` steps, which the two groups of a block take in turn. Counted in the steps of one group:
// when it sends step s, one step ahead, it has written step s - 2, for which all blocks had sent
// their sums. When they sent those, they had written step s - 4, and merged the sums of that step's
// tile. Without `ahead` these are steps s - 1 and s - 2.
constexpr int norm_part_tiles(int steps, bool ahead) {
  if (!ahead) return steps == 1 ? 4 : 2;
  return steps == 1 ? 8 : steps < 4 ? 4 : 2;
}

// Shared memory of a block: the ring, and eight bytes of sums for each row and unit of columns.
constexpr int64_t norm_tiles_bytes(const NormTilesPolicy& p, int64_t element_size) {
  const int64_t parts = kStepElements / kNormTileUnitCols * p.cluster * p.steps * p.part_tiles;
  return p.slots * kStepElements * element_size + parts * 8;
}

// Adds slots and partial sums to a policy, as many as there is room for. Returns a policy of 0 rows
// if a tile does not fit.
constexpr NormTilesPolicy norm_tiles_ring(NormTilesPolicy p, int64_t element_size,
                                          const DeviceLimits& device) {
  for (const bool ahead : {true, false}) {
    p.ahead = ahead;
    p.part_tiles = norm_part_tiles(p.steps, ahead);
    p.slots = 0;
    const int64_t room = device.shared_bytes - kTileReserve - norm_tiles_bytes(p, element_size);
    // More slots than for the steps that are computed or being loaded gain nothing.
    const int most = std::min(p.steps + 3, kNormTileSlots);
    p.slots = static_cast<int>(std::min<int64_t>(room / (kStepElements * element_size), most));
    // If a tile is one step, it belongs to one group, and the groups do not wait for each other. So
    // they must not share slots: each has half of them.
    if (p.steps < kNormTileGroups) p.slots = p.slots / kNormTileGroups * kNormTileGroups;
    if (p.slots >= p.steps && p.slots >= (ahead ? 2 : 1) * kNormTileGroups) return p;
  }
  return {};
}

// The cost of a policy by a rough model, to compare policies. A cluster takes one round per tile,
// and half a round more to fill and empty the ring. A round takes the time of its steps and a
// little more. A round hides less latency if a tile has more steps than there are groups, and still
// less if sums are not sent ahead. Columns of 32 rows are written a little slower.
constexpr int64_t norm_tiles_cost(const NormTilesPolicy& p, int64_t rows,
                                  const DeviceLimits& device) {
  const int64_t tiles = (rows + p.rows - 1) / p.rows, resident = device.resident(p.cluster);
  const int64_t rounds = (tiles + resident - 1) / resident;
  const int64_t hidden = !p.ahead ? 30 : p.steps > kNormTileGroups ? 24 : 20;
  return (2 * rounds + 1) * (5 * p.steps + 3) * hidden * (p.rows == 32 ? 21 : 20);
}

struct NormTilesShape {
  int64_t rows = 0, cols = 0, element_size = 0;
  DeviceLimits device;

  bool operator==(const NormTilesShape&) const = default;
};

constexpr NormTilesPolicy norm_tiles_policy(const NormTilesShape& s) {
  NormTilesPolicy best;
  for (const int tile_rows : {64, 32}) {
    const int64_t width = kStepElements / tile_rows, units = (s.cols + width - 1) / width;
    for (int cluster = 1; cluster <= s.device.cluster; ++cluster) {
      const int64_t steps = std::max<int64_t>((units + cluster - 1) / cluster, 1);
      if (steps > kNormTileSlots || (cluster > 1 && (cluster - 1) * steps >= units)) continue;
      const NormTilesPolicy policy =
          norm_tiles_ring({.rows = tile_rows, .steps = static_cast<int>(steps), .cluster = cluster},
                          s.element_size, s.device);
      if (policy.rows == 0) continue;
      if (best.rows == 0 ||
          norm_tiles_cost(policy, s.rows, s.device) < norm_tiles_cost(best, s.rows, s.device))
        best = policy;
    }
  }
  return best;
}

// The number of clusters in the grid.
constexpr int64_t norm_tiles_clusters(const NormTilesPolicy& p, int64_t tiles,
                                      const DeviceLimits& device) {
  return balanced_grid(tiles, device.resident(p.cluster));
}

// Backward, by persistent clusters of blocks that take batch after batch of rows. A block handles
// `width` columns of `groups` rows; for each row it has `threads` threads, which hold up to `packs`
// packs each. Shared memory holds `stages` batches. Each cluster writes one row of partial dgamma
// and dbeta.
struct NormBackwardPolicy {
  int cluster = 0;  // 0: the row does not fit
  int width = 0;
  int threads = 0;
  int groups = 0;
  int packs = 0;
  int stages = 0;
};

struct NormBackwardShape {
  int64_t rows = 0, cols = 0;
  int64_t pack = 0;        // values that a thread handles at a time
  int64_t read_bytes = 0;  // per element: x, dy and the residual gradient
  int64_t write_bytes = 0;
  int64_t max_parts = 0;  // rows of partial sums that there is room for
  DeviceLimits device;

  bool operator==(const NormBackwardShape&) const = default;
};

inline constexpr int64_t kBackwardThreads = 512;
inline constexpr int64_t kBackwardGroups = 16;
inline constexpr int64_t kBackwardStages = 3;  // with fewer, loads wait for the sums of a batch
inline constexpr int64_t kBackwardFewestStages = 2;

// Bytes of shared memory for the batches and gamma. More than kMost gains nothing.
constexpr int64_t norm_backward_room(const DeviceLimits& device) {
  constexpr int64_t kMost = 216 << 10, kReserve = 4 << 10;
  return std::min(device.shared_bytes - kReserve, kMost);
}

constexpr NormBackwardPolicy norm_backward_candidate(const NormBackwardShape& s, int64_t cluster,
                                                     int64_t packs, int64_t stages) {
  const int64_t width = round_up((s.cols + cluster - 1) / cluster, 8);
  const int64_t threads = round_up((width + s.pack * packs - 1) / (s.pack * packs), 32);
  if ((cluster - 1) * width >= s.cols || threads > kBackwardThreads) return {};
  const int64_t room = (norm_backward_room(s.device) - 4 * width) / (width * s.read_bytes);
  const int64_t groups = std::min({kBackwardThreads / threads, kBackwardGroups, room / stages});
  if (groups <= 0) return {};
  return {static_cast<int>(cluster), static_cast<int>(width), static_cast<int>(threads),
          static_cast<int>(groups),  static_cast<int>(packs), static_cast<int>(stages)};
}

constexpr int64_t norm_backward_clusters(const NormBackwardShape& s, const NormBackwardPolicy& p) {
  const int64_t batches = (s.rows + p.groups - 1) / p.groups;
  return std::max<int64_t>(std::min({batches, s.max_parts, s.device.resident(p.cluster)}), 1);
}

// The clocks that a policy takes, by a rough model. A round takes the longer of two times. The
// first is that of its bytes, at a multiprocessor's share of the bandwidth (18 bytes per clock).
// The second is that of its instructions (18 per value and 90 per thread, issued at a rate that
// grows with the number of warps), plus that of combining the sums. Partial sums are written to L2
// and read back.
constexpr int64_t norm_backward_clocks(const NormBackwardShape& s, const NormBackwardPolicy& p) {
  const int64_t clusters = norm_backward_clusters(s, p);
  const int64_t batches = (s.rows + p.groups - 1) / p.groups;
  const int64_t rounds = (batches + clusters - 1) / clusters;
  const int64_t memory = int64_t{p.groups} * p.width * (s.read_bytes + s.write_bytes) / 18;
  const int64_t warps = int64_t{p.groups} * p.threads / 32;
  const int64_t row_values = (p.width + p.threads * s.pack - 1) / (p.threads * s.pack) * s.pack;
  const int64_t instructions = warps * (row_values * 18 + 90);
  const int64_t issued_per_10_clocks = std::min<int64_t>(3 * warps / 2 + 1, 22);
  const int64_t meeting = p.cluster == 1 ? 400 : 800 + 100 * p.cluster;
  const int64_t round = std::max(memory, instructions * 10 / issued_per_10_clocks + meeting);
  return rounds * round + clusters * s.cols * 16 / (20 * int64_t{s.device.multiprocessors});
}

constexpr NormBackwardPolicy norm_backward_policy(const NormBackwardShape& s) {
  NormBackwardPolicy best;
  for (int64_t stages = kBackwardStages; stages >= kBackwardFewestStages; --stages) {
    for (int64_t cluster = 1; cluster <= s.device.cluster; cluster *= 2) {
      for (const int64_t packs : {4, 2}) {
        auto candidate = norm_backward_candidate(s, cluster, packs, stages);
        // Fewer groups may divide the rows better.
        for (const int fewest = (candidate.groups + 1) / 2;
             candidate.groups > 0 && candidate.groups >= fewest; --candidate.groups)
          if (best.cluster == 0 ||
              norm_backward_clocks(s, candidate) < norm_backward_clocks(s, best))
            best = candidate;
      }
    }
    if (best.cluster != 0) break;
  }
  return best;
}

// Backward of narrow rows, with one pack per lane. There is one block on each of `blocks`
// multiprocessors, whose threads hold `rows` rows at a time, each row in `lanes` lanes.
struct NormNarrowPolicy {
  int lanes = 0;  // 8, 16 or 32; 0: the row does not fit
  int rows = 0;
  int blocks = 0;
};

inline constexpr int kNormNarrowThreads = 768;

// Chooses as few rows at a time as the number of rounds allows, so that all multiprocessors get the
// same number of rows.
constexpr NormNarrowPolicy norm_narrow_policy(int64_t rows, int64_t packs_per_row,
                                              int64_t most_blocks) {
  if (packs_per_row > 32) return {};
  int64_t lanes = 32;
  while (lanes > 8 && packs_per_row <= lanes / 2) lanes /= 2;
  const int64_t most = most_blocks * (kNormNarrowThreads / lanes);
  const int64_t rounds = (rows + most - 1) / most;
  const int64_t wanted = (rows + most_blocks * rounds - 1) / (most_blocks * rounds);
  const int64_t rows_of_block = round_up(wanted, 32 / lanes);  // whole warps
  const int64_t rows_in_all = rows_of_block * rounds;
  return {static_cast<int>(lanes), static_cast<int>(rows_of_block),
          static_cast<int>((rows + rows_in_all - 1) / rows_in_all)};
}

// The grid of the forward, for `items` blocks' worth of rows. If these are at most four times what
// the GPU holds at once, persistent blocks divide them evenly. If there are more, each block takes
// one item and exits: then all multiprocessors work in one region of the tensor, which memory
// serves faster. `staying` asks for persistent blocks in any case: those that report an amax at
// their end, and those of several rows, which take 4 to 5 % less time so on an H200.
constexpr int64_t norm_rows_grid(int64_t items, int64_t resident, bool staying) {
  if (!staying && items > 4 * resident) return items;
  return balanced_grid(items, resident);
}

}  // namespace te::cuda
