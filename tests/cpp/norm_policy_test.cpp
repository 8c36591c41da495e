// The launch policies of the norm kernels: the threads of a row cover all its columns, and the
// memory of a block is large enough. A simulation checks the protocol of the tile kernel.
#include "cuda/policy/norm.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <array>
#include <random>
#include <vector>

#include "ops/moments.h"

namespace te::cuda {
namespace {

// A100, RTX 3090, L40, H200, H200 without clusters, RTX 5090.
const std::vector<DeviceLimits> kDevices = {
    limits_of({80, 80, 108, 163 << 10}, {}), limits_of({86, 86, 82, 99 << 10}, {}),
    limits_of({89, 89, 142, 99 << 10}, {}),  limits_of({90, 90, 132, 227 << 10}, {}),
    limits_of({90, 80, 132, 227 << 10}, {}), limits_of({120, 120, 170, 99 << 10}, {}),
};
const DeviceLimits& kHopper = kDevices[3];

TEST(NormRowsPolicy, CoversEveryRow) {
  for (int64_t packs = 1; packs <= 4096; ++packs) {
    const auto policy = norm_rows_policy(packs);
    ASSERT_GE(int64_t{policy.threads} * policy.packs, packs);
    ASSERT_TRUE(policy.threads % 32 == 0 || (policy.packs == 1 && 32 % policy.threads == 0));
    ASSERT_LE(policy.threads * policy.rows, 1024);
    ASSERT_TRUE(policy.rows == 1 || policy.threads <= 32);
    ASSERT_EQ(policy.threads * policy.rows % 32, 0);
  }
  EXPECT_EQ(norm_rows_policy(4097).threads, 0);
}

// Checks a policy: every block of a cluster has columns, and the buffers fit the shared memory.
void expect_tiles(const NormTilesPolicy& policy, const DeviceLimits& device, int64_t cols,
                  int64_t size) {
  ASSERT_TRUE(policy.rows == 64 || policy.rows == 32);
  const int64_t width = policy.steps * (kStepElements / policy.rows);
  ASSERT_GE(policy.cluster * width, cols);
  ASSERT_LT((policy.cluster - 1) * width, cols);
  ASSERT_LE(policy.cluster, device.cluster);
  constexpr int64_t kTables = 3 << 10;
  ASSERT_LE(norm_tiles_bytes(policy, size) + kTables, device.shared_bytes);
  // The ring has room for a whole tile; if sums are sent ahead, also for two steps of each group.
  ASSERT_GE(policy.slots, policy.steps);
  ASSERT_LE(policy.slots, kNormTileSlots);
  ASSERT_LE(policy.part_tiles, kNormPartTiles);
  ASSERT_GE(policy.slots, (policy.ahead ? 2 : 1) * kNormTileGroups);
  ASSERT_TRUE(policy.steps >= kNormTileGroups || policy.slots % kNormTileGroups == 0);
}

TEST(NormTilesPolicy, TakesRowsThatFitTheSharedMemory) {
  for (const DeviceLimits& device : kDevices) {
    for (const int64_t size : {2, 4}) {
      for (const int64_t rows : {1, 64, 2048, 100000}) {
        for (int64_t cols = 8; cols <= 12288; cols += 8) {
          const auto policy = norm_tiles_policy({rows, cols, size, device});
          const bool fit = size == 2 || device.shared_bytes > 128 << 10;  // one step of each group
          const bool must = fit && cols <= (device.cluster > 1 ? 4096 : 512);
          if (must || policy.rows != 0) expect_tiles(policy, device, cols, size);
        }
      }
    }
  }
  for (const int64_t size : {2, 4})
    EXPECT_NE(norm_tiles_policy({64, 12288, size, kHopper}).rows, 0);
}

// The blocks write their moments to the workspace of an op of this shape, which has room for them.
TEST(NormTilesPolicy, BlocksHaveRoomForMoments) {
  for (const DeviceLimits& device : kDevices) {
    for (const int64_t rows : {0, 1, 33, 64, 512, 768, 2048, 100000}) {
      for (int64_t cols = kNormTileUnitCols; cols <= 12288; cols += kNormTileUnitCols) {
        const auto policy = norm_tiles_policy({rows, cols, 2, device});
        if (policy.rows == 0) continue;
        const int64_t tiles = std::max<int64_t>((rows + policy.rows - 1) / policy.rows, 1);
        const int64_t blocks = norm_tiles_clusters(policy, tiles, device) * policy.cluster;
        ASSERT_LE(tile_moments_bytes(blocks), tile_moments_workspace_bytes(rows, cols))
            << rows << " x " << cols;
      }
    }
  }
}

// The numbers of clusters are those of a Hopper GPU, some of whose GPCs lack multiprocessors.
TEST(NormTilesPolicy, StaysWhatWasMeasuredOnHopper) {
  const DeviceLimits device =
      limits_of({90, 90, 132, 227 << 10, {0, 132, 66, 39, 30, 22, 17, 15, 15}}, {});
  const auto same = [&](int64_t rows, int64_t cols, int tile_rows, int steps, int cluster) {
    const auto policy = norm_tiles_policy({rows, cols, 2, device});
    return policy.rows == tile_rows && policy.steps == steps && policy.cluster == cluster;
  };
  EXPECT_TRUE(same(8192, 4096, 64, 2, 8));
  EXPECT_TRUE(same(16384, 4096, 64, 2, 8));
  EXPECT_TRUE(same(2048, 4096, 32, 4, 2));
  EXPECT_TRUE(same(8192, 8192, 32, 2, 8));
  EXPECT_TRUE(same(1024, 12288, 32, 4, 6));
  EXPECT_TRUE(same(8192, 2048, 32, 2, 2));
  EXPECT_TRUE(same(16384, 1024, 64, 2, 2));
  EXPECT_TRUE(same(8192, 768, 64, 3, 1));
  EXPECT_EQ(norm_tiles_clusters(norm_tiles_policy({8192, 4096, 2, device}), 128, device), 15);
}

// A simulation of groups of warps that send and write steps as the kernel does, in random order. It
// checks three properties. No group waits for ever. All blocks have merged the sums of a tile
// before these are overwritten. When a group fills a slot again, the previous filling has been
// sent, because a barrier can only distinguish two successive fillings.
class Groups {
 public:
  Groups(const NormTilesPolicy& policy, int tiles) : p_(policy), steps_(tiles * policy.steps) {}

  // Runs blocks of kNormTileGroups groups. Returns whether all groups ended and nothing was wrong.
  bool run(unsigned seed) {
    std::minstd_rand random(seed);
    for (int turns = 0; turns < 1000 * steps_; ++turns) {
      const int mover = static_cast<int>(random() % kMovers);
      advance(mover);
      bool ended = true;
      for (int i = 0; i < kMovers; ++i) ended &= done(i);
      if (ended) return !broken_;
    }
    return false;
  }

 private:
  static constexpr int kBlocks = 2, kMovers = kBlocks * kNormTileGroups;

  static int step_at(int mover, int i) { return mover % kNormTileGroups + i * kNormTileGroups; }
  bool done(int mover) const { return step_at(mover, written_[mover]) >= steps_; }
  // Whether the group of `block` that owns `step` has done it.
  static bool has_done(const std::array<int, kMovers>& done, int block, int step) {
    return done[block * kNormTileGroups + step % kNormTileGroups] > step / kNormTileGroups;
  }
  bool has_written(int block, int step) const { return has_done(written_, block, step); }
  bool has_sent(int block, int step) const { return has_done(sent_, block, step); }

  void advance(int mover) {
    if (done(mover)) return;
    const int now = step_at(mover, written_[mover]), unsent = step_at(mover, sent_[mover]);
    const bool due =
        sent_[mover] <= written_[mover] + (p_.ahead ? 1 : 0) || unsent / p_.steps == now / p_.steps;
    if (unsent < steps_ && due) {
      const int before = unsent - p_.slots;  // the previous step in its slot
      const int block = mover / kNormTileGroups;
      if (before >= 0) {
        broken_ |= !has_sent(block, before);
        if (!has_written(block, before)) return;
      }
      check_overwritten(unsent / p_.steps - p_.part_tiles);
      ++sent_[mover];
      return;
    }
    const int tile = now / p_.steps;
    for (int step = tile * p_.steps; step < (tile + 1) * p_.steps; ++step)
      for (int block = 0; block < kBlocks; ++block)
        if (!has_sent(block, step)) return;
    ++written_[mover];
  }

  void check_overwritten(int tile) {
    if (tile < 0) return;
    for (int step = tile * p_.steps; step < (tile + 1) * p_.steps; ++step)
      for (int block = 0; block < kBlocks; ++block) broken_ |= !has_written(block, step);
  }

  NormTilesPolicy p_;
  int steps_;
  std::array<int, kMovers> sent_{}, written_{};
  bool broken_ = false;
};

TEST(NormTilesPolicy, NobodyWaitsForEverOrOverwritesSums) {
  for (int steps = 1; steps <= kNormTileSlots; ++steps) {
    for (int slots = steps; slots <= kNormTileSlots; ++slots) {
      for (const bool ahead : {false, true}) {
        if (slots < (ahead ? 2 : 1) * kNormTileGroups) continue;
        if (steps < kNormTileGroups && slots % kNormTileGroups != 0) continue;
        NormTilesPolicy policy{.rows = 64, .steps = steps, .cluster = 2, .slots = slots};
        policy.ahead = ahead;
        policy.part_tiles = norm_part_tiles(steps, ahead);
        for (unsigned seed = 1; seed <= 40; ++seed)
          EXPECT_TRUE(Groups(policy, 12).run(seed)) << steps << ' ' << slots << ' ' << ahead;
      }
    }
  }
}

TEST(NormRowsGrid, SharesOutAFewRowsAndLetsManyCome) {
  EXPECT_EQ(norm_rows_grid(100, 1056, false), 100);
  EXPECT_EQ(norm_rows_grid(2048, 1056, false), 1024);
  EXPECT_EQ(norm_rows_grid(8192, 1056, false), 8192);
  EXPECT_EQ(norm_rows_grid(8192, 1056, true), 1024);
}

void expect_room(const NormBackwardShape& shape, const NormBackwardPolicy& policy) {
  ASSERT_EQ(policy.width % 8, 0);
  ASSERT_GE(int64_t{policy.cluster} * policy.width, shape.cols);
  ASSERT_LT(int64_t{policy.cluster - 1} * policy.width, shape.cols) << "a block without columns";
  ASSERT_GE(policy.threads * policy.packs * shape.pack, policy.width);
  ASSERT_EQ(policy.threads % 32, 0);
  ASSERT_LE(policy.threads * policy.groups, kBackwardThreads);
  ASSERT_GE(policy.groups, 1);
  ASSERT_LE(policy.stages, kBackwardStages);
  ASSERT_GE(policy.stages, kBackwardFewestStages);
  ASSERT_LE(policy.cluster, shape.device.cluster);
  const int64_t stage = policy.groups * policy.width * shape.read_bytes;
  constexpr int64_t kTables = 3 << 10;
  ASSERT_LE(policy.stages * stage + 4 * policy.width + kTables, shape.device.shared_bytes);
  // In the end, the partial sums of all groups are merged in the memory of the stages.
  ASSERT_GE(policy.stages * stage, 8 * policy.groups * policy.width);
  const int64_t clusters = norm_backward_clusters(shape, policy);
  ASSERT_LE(clusters, std::max<int64_t>(shape.max_parts, 1));
  ASSERT_LE(clusters * policy.cluster, shape.device.multiprocessors);
}

// The widest row of each device in bf16 (x and dy) and in fp32 with a residual gradient.
TEST(NormBackwardPolicy, TakesRowsThatFitTheSharedMemory) {
  for (const DeviceLimits& device : kDevices) {
    const bool clusters = device.cluster > 1;
    for (const auto& [pack, read, write] :
         {std::tuple{8, 4, 2}, {8, 6, 2}, {4, 8, 4}, {4, 12, 4}, {4, 6, 4}, {4, 10, 4}}) {
      const int64_t room = std::min<int64_t>(device.shared_bytes, 216 << 10) - (8 << 10);
      const int64_t sure = room / (2 * read + 4);
      for (const int64_t rows : {1, 33, 1024, 8192, 200000}) {
        for (int64_t cols = 8; cols <= 16384; cols += cols < 2048 ? 8 : 472) {
          const NormBackwardShape shape{rows, cols, pack, read, write, (rows + 31) / 32, device};
          const auto policy = norm_backward_policy(shape);
          const bool must = clusters || cols <= std::min<int64_t>(sure, 512 * 4 * pack);
          if (must || policy.cluster != 0) expect_room(shape, policy);
        }
      }
    }
  }
}

TEST(NormBackwardPolicy, SharesWideAndFewRows) {
  const auto cluster_of = [](int64_t rows, int64_t cols) {
    return norm_backward_policy({rows, cols, 8, 4, 2, (rows + 31) / 32, kHopper}).cluster;
  };
  EXPECT_EQ(cluster_of(8192, 4096), 1);
  EXPECT_GT(cluster_of(2048, 4096), 1);
  EXPECT_GT(cluster_of(1024, 12288), 2);
}

TEST(NormNarrowPolicy, SharesRowsOutEvenly) {
  for (const int64_t blocks : {1, 4, 132}) {
    for (const int64_t rows : {1, 3, 32, 1024, 8192, 131072, 131073}) {
      for (int64_t packs = 1; packs <= 32; ++packs) {
        const auto policy = norm_narrow_policy(rows, packs, blocks);
        ASSERT_GE(policy.lanes, packs);
        ASSERT_TRUE(policy.lanes == 8 || policy.lanes < 2 * packs) << "idle lanes";
        ASSERT_EQ(policy.lanes * policy.rows % 32, 0) << "a part of a warp";
        ASSERT_LE(policy.lanes * policy.rows, kNormNarrowThreads);
        ASSERT_LE(policy.blocks, blocks);
        // Every block has a row.
        ASSERT_GT(rows, (policy.blocks - 1) * policy.rows);
      }
    }
  }
  EXPECT_EQ(norm_narrow_policy(1024, 33, 132).lanes, 0);
}

TEST(BalancedGrid, GivesAllBlocksTheSameRounds) {
  EXPECT_EQ(balanced_grid(0, 1056), 1);
  EXPECT_EQ(balanced_grid(1056, 1056), 1056);
  EXPECT_EQ(balanced_grid(2048, 1056), 1024);
  EXPECT_EQ(balanced_grid(8192, 1056), 1024);
}

}  // namespace
}  // namespace te::cuda
