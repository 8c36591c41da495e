// How cuBLASLt multiplies: one kernel and its knobs, as numbers that can be written down.
//
// Which algorithm a GEMM takes: that of its row in policy/gemm_table.inc, or of a row near to it
// (policy/gemm_table.h), if the library accepts it here, else the first guess of the library's
// heuristic. Nothing is ever timed while a model runs, so runs repeat bit for bit;
// benchmarks/tune_gemm.py times and writes the table.
#pragma once

#include <array>
#include <optional>
#include <vector>

#include "cuda/cublaslt.h"
#include "cuda/policy/gemm_table.h"
#include "ops/gemm_tuning.h"

namespace te::cuda {

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

}  // namespace te::cuda
