// Every row is covered by its threads, and every block has room for what it holds.
#include "cuda/policy/norm.h"

#include <gtest/gtest.h>

#include <vector>

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

// Blocks without columns do not occur; wide rows are left to other kernels where they do not fit.
void expect_tiles(const NormTilesPolicy& policy, const DeviceLimits& device, int64_t cols,
                  int64_t size) {
  ASSERT_TRUE(policy.rows == 64 || policy.rows == 32);
  const int64_t width = policy.steps * (kStepElements / policy.rows);
  ASSERT_GE(policy.cluster * width, cols);
  ASSERT_LT((policy.cluster - 1) * width, cols);
  ASSERT_LE(policy.cluster, device.cluster);
  const int64_t parts = int64_t{64} * policy.cluster * 16;
  constexpr int64_t kTables = 2 << 10;
  ASSERT_LE(policy.steps * kStepElements * size + parts + kTables, device.shared_bytes);
}

TEST(NormTilesPolicy, TakesRowsThatFitTheSharedMemory) {
  for (const DeviceLimits& device : kDevices) {
    for (const int64_t size : {2, 4}) {
      for (const int64_t rows : {1, 64, 2048, 100000}) {
        for (int64_t cols = 8; cols <= 12288; cols += 8) {
          const auto policy = norm_tiles_policy(rows, cols, size, device);
          const bool must = cols <= (device.cluster > 1 ? 4096 : 512);
          if (must || policy.rows != 0) expect_tiles(policy, device, cols, size);
        }
      }
    }
  }
  for (const int64_t size : {2, 4}) EXPECT_NE(norm_tiles_policy(64, 12288, size, kHopper).rows, 0);
}

TEST(NormTilesPolicy, StaysWhatWasMeasuredOnHopper) {
  const auto same = [](const NormTilesPolicy& policy, int rows, int steps, int cluster) {
    return policy.rows == rows && policy.steps == steps && policy.cluster == cluster;
  };
  EXPECT_TRUE(same(norm_tiles_policy(8192, 4096, 2, kHopper), 64, 2, 8));
  EXPECT_TRUE(same(norm_tiles_policy(8192, 12288, 2, kHopper), 32, 3, 8));
  EXPECT_TRUE(same(norm_tiles_policy(8192, 12288, 4, kHopper), 32, 3, 8));
  EXPECT_TRUE(same(norm_tiles_policy(8192, 2048, 2, kHopper), 32, 2, 2));
  EXPECT_TRUE(same(norm_tiles_policy(8192, 768, 2, kHopper), 32, 1, 2));
  EXPECT_TRUE(same(norm_tiles_policy(64, 768, 4, kHopper), 32, 1, 2));
  EXPECT_TRUE(same(norm_tiles_policy(131072, 128, 2, kHopper), 64, 1, 1));
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
  // The partial sums of all groups meet in what were the stages.
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

TEST(BalancedGrid, GivesAllBlocksTheSameRounds) {
  EXPECT_EQ(balanced_grid(0, 1056), 1);
  EXPECT_EQ(balanced_grid(1056, 1056), 1056);
  EXPECT_EQ(balanced_grid(2048, 1056), 1024);
  EXPECT_EQ(balanced_grid(8192, 1056), 1024);
}

}  // namespace
}  // namespace te::cuda
