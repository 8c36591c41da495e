// The layout of the scales of blocks, and their values at the ends of a dtype's range.
#include "core/scale_blocks.h"

#include <gtest/gtest.h>

#include <set>

#include "core/scaling.h"

namespace te {
namespace {

TEST(ScaleGrid, HoldsOneScaleABlockAndRoundsUpItsLastSize) {
  const ScaleGrid rows = scale_grid(ScaleBlocks::Rows, 130, 300);
  EXPECT_EQ(rows.rows, 3);
  EXPECT_EQ(rows.cols, 132);
  const ScaleGrid squares = scale_grid(ScaleBlocks::Squares, 130, 300);
  EXPECT_EQ(squares.rows, 2);
  EXPECT_EQ(squares.cols, 4);
}

TEST(ScaleGrid, GivesElementsOfABlockOnePlaceAndBlocksPlacesOfTheirOwn) {
  for (const ScaleBlocks blocks : {ScaleBlocks::Rows, ScaleBlocks::Squares}) {
    const ScaleGrid grid = scale_grid(blocks, 130, 300);
    const int64_t height = blocks == ScaleBlocks::Rows ? 1 : kScaleBlock;
    std::set<int64_t> seen;
    for (int64_t i = 0; i < 130; ++i) {
      for (int64_t j = 0; j < 300; ++j) {
        const int64_t at = grid.at(i, j);
        ASSERT_LT(at, grid.rows * grid.cols);
        ASSERT_EQ(at, grid.at(i / height * height, j / kScaleBlock * kScaleBlock));
        seen.insert(at);
      }
    }
    EXPECT_EQ(static_cast<int64_t>(seen.size()), blocks == ScaleBlocks::Rows ? 130 * 3 : 2 * 3);
  }
}

TEST(ScaleGrid, OfNothingIsEmpty) {
  for (const ScaleBlocks blocks : {ScaleBlocks::Rows, ScaleBlocks::Squares}) {
    for (const auto& [rows, cols] : {std::pair{0, 64}, std::pair{64, 0}}) {
      const ScaleGrid grid = scale_grid(blocks, rows, cols);
      EXPECT_EQ(grid.rows * grid.cols, 0);
    }
  }
}

TEST(BlockScale, StaysWithinTheTypeOfTheValues) {
  const float tiny = bits_float(0x00000001u);
  EXPECT_EQ(float_bits(block_scale<float>(tiny, 448.0f, 0.0f, false)), kLargestFiniteBits);
  EXPECT_EQ(float_bits(block_scale<BFloat16>(tiny, 448.0f, 0.0f, false)), 0x7f7f0000u);
  EXPECT_EQ(block_scale<BFloat16>(tiny, 448.0f, 0.0f, true), bits_float(254u << 23));
  EXPECT_EQ(block_scale<Half>(tiny, 448.0f, 0.0f, false), 65504.0f);
  EXPECT_EQ(block_scale<Half>(1.0f / 16777216.0f, 448.0f, 0.0f, false), 448.0f * 16777216.0f);
}

TEST(BlockScale, IsOneWhereValuesSayNothing) {
  for (const float amax : {0.0f, bits_float(kInfinityBits)})
    EXPECT_EQ(block_scale<BFloat16>(amax, 448.0f, 0.0f, true), 1.0f);
  EXPECT_EQ(block_scale<BFloat16>(0.0f, 448.0f, 7.0f, false), 64.0f);
}

}  // namespace
}  // namespace te
