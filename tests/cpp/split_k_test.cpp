// Split-K products that lose terms.
#include "cuda/policy/split_k.h"

#include <gtest/gtest.h>

namespace te::cuda {
namespace {

constexpr DType kHalf = DType::BFloat16;

TEST(SplitK, LosesTermsIfTheWholeTilesDivideEvenly) {
  EXPECT_TRUE(split_loses_terms(kHalf, 8193, 2));               // 128 tiles and 1 term
  EXPECT_TRUE(split_loses_terms(kHalf, 11528, 9));              // 180 tiles and 8 terms
  EXPECT_TRUE(split_loses_terms(kHalf, 57608, 45));             // 900 tiles and 8 terms
  EXPECT_TRUE(split_loses_terms(DType::Float8E4M3, 11536, 9));  // 90 tiles of 128 and 16 terms
}

TEST(SplitK, KeepsTermsOfWholeTiles) {
  for (const int32_t parts : {1, 2, 9, 45}) {
    EXPECT_FALSE(split_loses_terms(kHalf, 8192, parts));
    EXPECT_FALSE(split_loses_terms(kHalf, 64 * 180, parts));
    EXPECT_FALSE(split_loses_terms(DType::Float8E4M3, 128 * 90, parts));
  }
}

TEST(SplitK, KeepsTermsIfAPartIsLonger) {
  EXPECT_FALSE(split_loses_terms(kHalf, 8193, 5));
  EXPECT_FALSE(split_loses_terms(kHalf, 11528, 7));
}

TEST(SplitK, OnePartHasAllTerms) { EXPECT_FALSE(split_loses_terms(kHalf, 8193, 1)); }

}  // namespace
}  // namespace te::cuda
