// The table of tuned GEMM algorithms: a problem finds its own row, or that of a similar problem.
#include "cuda/policy/gemm_table.h"

#include <gtest/gtest.h>

#include <algorithm>

namespace te::cuda {
namespace {

constexpr DType kE4M3 = DType::Float8E4M3;

// A product of the forward pass in FP8.
GemmProblem fprop(int64_t m, int64_t n, int64_t k) {
  return {.m = m,
          .n = n,
          .k = k,
          .a = kE4M3,
          .b = kE4M3,
          .d = DType::BFloat16,
          .fast_accumulation = true};
}

std::optional<GemmAlgorithm> row_of(const GemmProblem& problem) {
  for (const GemmTableRow& row : gemm_table())
    if (row.problem == problem) return row.algorithm;
  return std::nullopt;
}

constexpr GemmAlgorithm kGuess{};

TEST(GemmTable, HasEachProblemOnce) {
  for (const GemmTableRow& row : gemm_table()) {
    EXPECT_EQ(find_in_table(row.problem).value_or(kGuess), row.algorithm);
    const auto is_same = [&](const GemmTableRow& other) { return other.problem == row.problem; };
    EXPECT_EQ(std::count_if(gemm_table().begin(), gemm_table().end(), is_same), 1);
  }
}

TEST(GemmTable, LargeForwardProductsTakeTheNearestRow) {
  const auto row = row_of(fprop(8192, 16384, 4096));
  ASSERT_TRUE(row);
  for (const auto& problem : {fprop(8192, 18000, 4096), fprop(7168, 16384, 4096),
                              fprop(8192, 16384, 5120), fprop(9000, 15360, 3584)}) {
    ASSERT_FALSE(row_of(problem));
    EXPECT_EQ(find_in_table(problem), row);
  }
}

TEST(GemmTable, ARowMayNameTheGuess) {
  ASSERT_EQ(row_of(fprop(8192, 8192, 4096)), kGuess);
  EXPECT_FALSE(find_in_table(fprop(8192, 8192, 4096)));
  EXPECT_EQ(find_in_table(fprop(8192, 8320, 4096)), row_of(fprop(8192, 6144, 4096)));
}

TEST(GemmTable, FarProblemsHaveNoRow) {
  EXPECT_FALSE(find_in_table(fprop(1 << 20, 1 << 20, 64)));
  EXPECT_FALSE(find_in_table(fprop(8192, 16384, 1 << 20)));
}

TEST(GemmTable, SmallProductsHaveNoRowButTheirOwn) {
  for (const auto& problem : {fprop(2048, 4096, 4096), fprop(4096, 1024, 4096), fprop(16, 16, 16)})
    EXPECT_FALSE(find_in_table(problem));
  EXPECT_TRUE(find_in_table(fprop(2048, 2048, 2048)));
}

TEST(GemmTable, OtherProductsHaveNoRowButTheirOwn) {
  GemmProblem problem = fprop(8192, 18000, 4096);
  problem.fast_accumulation = false;
  EXPECT_FALSE(find_in_table(problem));
  problem.a = problem.b = DType::BFloat16;
  EXPECT_FALSE(find_in_table(problem));
}

TEST(GemmTable, TypesMustAgree) {
  GemmProblem problem = fprop(8192, 18000, 4096);
  problem.d = DType::Float16;
  EXPECT_FALSE(find_in_table(problem));
}

}  // namespace
}  // namespace te::cuda
