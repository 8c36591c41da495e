// The index maps of tiled CUDA kernels, enumerated on the CPU.
#include "cuda/tile_layout.h"

#include <gtest/gtest.h>

#include <set>
#include <utility>
#include <vector>

namespace te::cuda {
namespace {

TEST(TileWalk, VisitsEveryTileOnce) {
  for (const auto& [rows, cols] : std::vector<std::pair<int, int>>{
           {1, 1}, {8, 3}, {9, 5}, {7, 4}, {64, 32}, {17, 1}, {1, 17}, {3, 2}})
    for (const bool backwards : {false, true}) {
      const TileWalk walk(rows, cols, backwards);
      std::set<std::pair<int, int>> seen;
      for (unsigned y = 0; y < walk.grid_y(); ++y)
        for (unsigned x = 0; x < walk.grid_x(); ++x) {
          const TilePlace place = walk.at(x, y);
          if (!walk.has(place)) continue;
          ASSERT_TRUE(place.row < rows && place.col >= 0 && place.col < cols);
          EXPECT_TRUE(seen.emplace(place.row, place.col).second);
        }
      EXPECT_EQ(seen.size(), static_cast<size_t>(rows * cols)) << rows << " x " << cols;
    }
}

template <class T>
class CodeTile : public testing::Test {};
using TileRows = testing::Types<CodeTileLayout<16>, CodeTileLayout<32>, CodeTileLayout<64>,
                                CodeTileLayout<128>, CodeTileLayout<256>>;
TYPED_TEST_SUITE(CodeTile, TileRows);

constexpr int kCols = 256;

TYPED_TEST(CodeTile, GivesEveryUnitAPlaceOfItsOwn) {
  std::set<int> seen;
  for (int col = 0; col < kCols; ++col)
    for (int row_block = 0; row_block < TypeParam::kUnits; ++row_block)
      seen.insert(TypeParam::unit(row_block, col));
  EXPECT_EQ(*seen.begin(), 0);
  EXPECT_EQ(*seen.rbegin(), kCols * TypeParam::kUnits - 1);
  EXPECT_EQ(seen.size(), static_cast<size_t>(kCols * TypeParam::kUnits));
}

TYPED_TEST(CodeTile, ReadsBackPairsInOrder) {
  for (int col = 0; col < kCols; ++col)
    for (int part = 0; part < TypeParam::kUnits / 2; ++part) {
      const int first = 2 * TypeParam::pair(part, col), odd = TypeParam::swapped(col) ? 1 : 0;
      EXPECT_EQ(first + odd, TypeParam::unit(2 * part, col));
      EXPECT_EQ(first + 1 - odd, TypeParam::unit(2 * part + 1, col));
    }
}

// A warp stores eight bytes per thread in two halves, and loads 16 bytes per thread in four
// quarters. Each half or quarter uses each of the 32 banks once.
TYPED_TEST(CodeTile, HasNoBankConflicts) {
  for (int row_block = 0; row_block < TypeParam::kUnits; ++row_block)
    for (int in_group = 0; in_group < 8; ++in_group)
      for (int half = 0; half < 2; ++half) {
        std::set<int> banks;
        for (int group = 0; group < 16; ++group)
          banks.insert(TypeParam::unit(row_block, 128 * half + 8 * group + in_group) % 16);
        EXPECT_EQ(banks.size(), 16u);
      }
  constexpr int kParts = TypeParam::kUnits / 2;
  for (int quarter = 0; quarter < kCols * kParts / 8; ++quarter) {
    std::set<int> banks;
    for (int chunk = 8 * quarter; chunk < 8 * quarter + 8; ++chunk)
      banks.insert(TypeParam::pair(chunk % kParts, chunk / kParts) % 8);
    EXPECT_EQ(banks.size(), 8u);
  }
}

}  // namespace
}  // namespace te::cuda
