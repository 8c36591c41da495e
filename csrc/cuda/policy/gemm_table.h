// Which cuBLASLt algorithm a GEMM uses on Hopper: the one that was measured for its problem, or for
// a similar problem. Data and arithmetic without CUDA, so that a CPU test can look problems up
// (tests/cpp/gemm_table_test.cpp).
#pragma once

#include <cmath>
#include <compare>
#include <optional>
#include <vector>

#include "core/dtype.h"
#include "core/scale_blocks.h"
#include "ops/gemm_tuning.h"

namespace te::cuda {

// The part of a GEMM that decides which algorithm is fast.
struct GemmProblem {
  int64_t m = 0, n = 0, k = 0;
  DType a{}, b{}, d{};
  bool a_transposed = false, b_transposed = false;
  bool fast_accumulation = false;
  ScaleBlocks a_blocks = ScaleBlocks::Whole, b_blocks = ScaleBlocks::Whole;
  bool adds = false;  // a matrix that is not D itself

  auto operator<=>(const GemmProblem&) const = default;
};

struct GemmTableRow {
  GemmProblem problem;
  GemmAlgorithm algorithm;  // zeros: the heuristic's first guess, for this problem only
};

inline const std::vector<GemmTableRow>& gemm_table() {
  static const std::vector<GemmTableRow> rows = {
#include "cuda/policy/gemm_table.inc"
  };
  return rows;
}

// Whether the result has more than two of the largest tiles for each multiprocessor of an H200. The
// speed of smaller GEMMs depends on how well their tiles happen to fill the GPU, so one of them
// says nothing about another.
inline bool fills_the_gpu(const GemmProblem& p) {
  constexpr int64_t kMultiprocessors = 132, kTile = 128 * 256;
  return p.m * p.n > 2 * kMultiprocessors * kTile;
}

// How often sizes must be doubled or halved to get from one problem to the other; infinite if they
// differ in more than their sizes.
inline double distance(const GemmProblem& p, const GemmProblem& q) {
  GemmProblem resized = q;
  resized.m = p.m, resized.n = p.n, resized.k = p.k;
  if (resized != p) return INFINITY;
  const auto doublings = [](int64_t a, int64_t b) {
    return std::fabs(std::log2(static_cast<double>(a) / static_cast<double>(b)));
  };
  return doublings(p.m, q.m) + doublings(p.n, q.n) + doublings(p.k, q.k);
}

// The algorithm of the problem's own row; nothing means the first guess of cuBLASLt's heuristic. A
// large FP8 GEMM of the forward without a row takes the algorithm of the nearest row: there the
// first guess is 5 to 15 % slower than what tuning finds, at nearly all sizes. Other GEMMs have
// rows for few sizes, so they keep the first guess.
inline std::optional<GemmAlgorithm> find_in_table(const GemmProblem& problem) {
  constexpr double kFarthest = 1.5;
  const bool looks_around = problem.fast_accumulation && fills_the_gpu(problem);
  std::optional<GemmAlgorithm> nearest;
  double least = kFarthest;
  for (const GemmTableRow& row : gemm_table()) {
    const bool is_guess = row.algorithm == GemmAlgorithm{};
    if (row.problem == problem) return is_guess ? std::nullopt : std::optional(row.algorithm);
    if (!looks_around || is_guess || !fills_the_gpu(row.problem)) continue;
    if (const double found = distance(problem, row.problem); found < least) {
      least = found;
      nearest = row.algorithm;
    }
  }
  return nearest;
}

}  // namespace te::cuda
