// How cuBLASLt multiplies: one kernel and its knobs, as numbers that can be written down.
//
// Which algorithm a GEMM takes: the row of policy/gemm_table.inc that has its problem, if the
// library accepts it here, else the first guess of the library's heuristic. Nothing is ever timed
// while a model runs, so runs repeat bit for bit; benchmarks/tune_gemm.py times and writes the
// table.
#pragma once

#include <array>
#include <compare>
#include <optional>
#include <vector>

#include "core/scale_blocks.h"
#include "cuda/cublaslt.h"
#include "ops/gemm_tuning.h"

namespace te::cuda {

// The part of a GEMM that decides which algorithm is fast.
struct GemmProblem {
  int64_t m = 0, n = 0, k = 0;
  DType a{}, b{}, d{};
  bool a_transposed = false, b_transposed = false;
  bool fast_accumulation = false;
  ScaleBlocks a_blocks = ScaleBlocks::Whole, b_blocks = ScaleBlocks::Whole;

  auto operator<=>(const GemmProblem&) const = default;
};

// Prints as a row of the table: `{8192, 4096, 4096, DType::BFloat16, ..., false}`; with the blocks
// of both operands where these have any.
std::ostream& operator<<(std::ostream& out, const GemmProblem& problem);

// A plan's view of itself for the functions below.
struct GemmTerms {
  cublasLtHandle_t handle;
  cublasComputeType_t compute;
  std::array<cudaDataType_t, 4> types;  // of the library's A, B, C and D
  cublasLtMatmulDesc_t desc;
  std::array<cublasLtMatrixLayout_t, 4> layouts;
  int64_t workspace_bytes;
};

// The heuristic's guesses, best first; empty where the library has no kernel for these terms.
std::vector<cublasLtMatmulAlgo_t> guess_algorithms(const GemmTerms& terms,
                                                   MatmulAlignment alignment, int limit);

GemmAlgorithm describe_algorithm(const cublasLtMatmulAlgo_t& algorithm);

// The library's form of a description; nothing where the library cannot run it on these terms.
std::optional<cublasLtMatmulAlgo_t> build_algorithm(const GemmTerms& terms,
                                                    const GemmAlgorithm& description);

// Everything one step away: another tile, depth, cluster, order of tiles or custom option.
std::vector<GemmAlgorithm> neighbours_of(const GemmTerms& terms, const GemmAlgorithm& description);

// The row of the committed table.
std::optional<GemmAlgorithm> find_in_table(const GemmProblem& problem);

}  // namespace te::cuda
