// What benchmarks/tune_gemm.py needs to find a faster algorithm than the library's first guess.
// All but the count speak of the plan that the last CUDA gemm of this process used; CUDA only.
#pragma once

#include <array>
#include <cstdint>
#include <string>
#include <vector>

namespace te {

// How the library multiplies, in its own numbers: algorithm, tile, stages, split k, reduction, tile
// order, custom option, inner shape, cluster.
using GemmAlgorithm = std::array<int32_t, 9>;

namespace cuda {

// Plans built so far; a GEMM that has run before adds none.
int64_t gemm_plan_count();

// The problem as a row of csrc/cuda/policy/gemm_table.inc begins.
std::string gemm_problem();

// The algorithm in use.
GemmAlgorithm gemm_algorithm();

// The heuristic's guesses, best first.
std::vector<GemmAlgorithm> gemm_guesses(int limit);

// Every algorithm that differs in one number and that the library accepts for this problem.
std::vector<GemmAlgorithm> gemm_neighbours(const GemmAlgorithm& algorithm);

// Uses this algorithm from now on; false where the library refuses it.
bool gemm_use(const GemmAlgorithm& algorithm);

// Uses the heuristic's first guess from now on, as if the table were empty.
void gemm_use_guess();

}  // namespace cuda
}  // namespace te
