// Algorithms of cuBLASLt, described by numbers that can be written into a table: the id of the
// algorithm and its attributes, such as tile and stages.
//
// A GEMM uses the algorithm of its row in policy/gemm_table.inc, or of a similar problem's row
// (policy/gemm_table.h), if cuBLASLt accepts it here, else the first guess of cuBLASLt's heuristic,
// which may be one for a rounded size (gemm_plan.h).
// Nothing is ever timed while a model runs, so runs repeat bit for bit; benchmarks/tune_gemm.py
// takes the times and writes the table.
#pragma once

#include <array>
#include <optional>
#include <vector>

#include "cuda/cublaslt.h"
#include "cuda/policy/gemm_table.h"
#include "ops/gemm_tuning.h"

namespace te::cuda {

// Prints as a row of the table: `{8192, 4096, 4096, DType::BFloat16, ..., false}`, followed by the
// scale blocks of both operands, and `true` if a matrix is added, if one of these is not the
// default.
std::ostream& operator<<(std::ostream& out, const GemmProblem& problem);

// What the functions below need of a plan.
struct GemmTerms {
  cublasLtHandle_t handle;
  cublasComputeType_t compute;
  std::array<cudaDataType_t, 4> types;  // of cuBLASLt's A, B, C and D
  cublasLtMatmulDesc_t desc;
  std::array<cublasLtMatrixLayout_t, 4> layouts;
  int64_t workspace_bytes;
  DType operands;
  int64_t k;
};

// The heuristic's guesses, best first; empty if cuBLASLt has no kernel for these terms. Left out
// are algorithms that would lose terms of sums (policy/split_k.h).
std::vector<cublasLtMatmulAlgo_t> guess_algorithms(const GemmTerms& terms,
                                                   MatmulAlignment alignment, int limit);

GemmAlgorithm describe_algorithm(const cublasLtMatmulAlgo_t& algorithm);

// Makes the algorithm of a description; nothing if cuBLASLt cannot run it on these terms, or would
// lose terms of sums.
std::optional<cublasLtMatmulAlgo_t> build_algorithm(const GemmTerms& terms,
                                                    const GemmAlgorithm& description);

// Whether the algorithm, which was made for other terms, runs on these and loses no terms of sums.
bool fits(const GemmTerms& terms, const cublasLtMatmulAlgo_t& algorithm);

// How much workspace a run of the algorithm is given. Most kernels for Hopper use it only for a
// counter, from which thread blocks take the tiles that they compute. cuBLASLt sets the counter to
// zero before each run, by a launch that costs 2 to 4 us with the gaps around it. Without a
// workspace the same kernel fixes in advance which block computes which tile. Results are the same
// bit for bit; large GEMMs are as fast, others are 1 to 6 % faster. So these kernels are given
// none, unless the GEMM `counts_tiles`: where another kernel occupies multiprocessors, such as one
// of NCCL, blocks that start late would leave their tiles for the end.
int64_t workspace_bytes(const GemmTerms& terms, const cublasLtMatmulAlgo_t& algorithm,
                        bool counts_tiles);

// All algorithms that differ in one number, and that cuBLASLt accepts: another tile, number of
// stages, cluster, order of tiles or custom option.
std::vector<GemmAlgorithm> neighbours_of(const GemmTerms& terms, const GemmAlgorithm& description);

}  // namespace te::cuda
