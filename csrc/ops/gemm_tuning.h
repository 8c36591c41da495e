// The functions with which benchmarks/tune_gemm.py looks for algorithms that are faster than the
// first one that cuBLASLt's heuristic returns. CUDA only. All but gemm_plan_count() are about the
// plan that the last CUDA GEMM of this process used.
#pragma once

#include <array>
#include <cstdint>
#include <string>
#include <vector>

namespace te {

// An algorithm of cuBLASLt, as the values of its attributes: algorithm, tile, stages, split k,
// reduction, tile order, custom option, inner shape, cluster.
using GemmAlgorithm = std::array<int32_t, 9>;

namespace cuda {

// Plans built so far; a GEMM that has run before adds none.
int64_t gemm_plan_count();

// The problem, written like the beginning of a row of csrc/cuda/policy/gemm_table.inc.
std::string gemm_problem();

// The algorithm in use.
GemmAlgorithm gemm_algorithm();

// The algorithms that cuBLASLt's heuristic returns, best first.
std::vector<GemmAlgorithm> gemm_guesses(int limit);

// Every algorithm that differs from this one in one attribute and that cuBLASLt accepts.
std::vector<GemmAlgorithm> gemm_neighbours(const GemmAlgorithm& algorithm);

// Uses this algorithm from now on; returns false if cuBLASLt refuses it.
bool gemm_use(const GemmAlgorithm& algorithm);

// Uses the heuristic's first guess from now on, as if the table were empty.
void gemm_use_guess();

}  // namespace cuda
}  // namespace te
