#include "cuda/gemm_algorithm.h"

#include <algorithm>
#include <ranges>

#include "cuda/policy/split_k.h"

namespace te::cuda {
namespace {

constexpr const char* kOp = "gemm";

enum Knob { kId, kTile, kStages, kSplitK, kReduction, kTileOrder, kCustom, kInnerShape, kCluster };

struct Attribute {
  cublasLtMatmulAlgoConfigAttributes_t name;
  size_t bytes;
};

// In the order of Knob.
constexpr std::array<Attribute, 9> kAlgorithmAttributes{{
    {CUBLASLT_ALGO_CONFIG_ID, 4},
    {CUBLASLT_ALGO_CONFIG_TILE_ID, 4},
    {CUBLASLT_ALGO_CONFIG_STAGES_ID, 4},
    {CUBLASLT_ALGO_CONFIG_SPLITK_NUM, 4},
    {CUBLASLT_ALGO_CONFIG_REDUCTION_SCHEME, 4},
    {CUBLASLT_ALGO_CONFIG_CTA_SWIZZLING, 4},
    {CUBLASLT_ALGO_CONFIG_CUSTOM_OPTION, 4},
    {CUBLASLT_ALGO_CONFIG_INNER_SHAPE_ID, 2},
    {CUBLASLT_ALGO_CONFIG_CLUSTER_SHAPE_ID, 2},
}};

// Enumerator of an FP8, half or single type as it is spelled in C++.
const char* enumerator(DType t) {
  switch (t) {
    case DType::Float32: return "DType::Float32";
    case DType::Float16: return "DType::Float16";
    case DType::BFloat16: return "DType::BFloat16";
    case DType::Float8E4M3: return "DType::Float8E4M3";
    case DType::Float8E5M2: return "DType::Float8E5M2";
    default: return "?";
  }
}

const char* enumerator(ScaleBlocks blocks) {
  switch (blocks) {
    case ScaleBlocks::Whole: return "ScaleBlocks::Whole";
    case ScaleBlocks::Rows: return "ScaleBlocks::Rows";
    case ScaleBlocks::Squares: return "ScaleBlocks::Squares";
  }
  return "?";
}

std::optional<cublasLtMatmulAlgo_t> initial(const GemmTerms& terms, int32_t id) {
  cublasLtMatmulAlgo_t algorithm{};
  const auto& [a, b, c, d] = terms.types;
  const cublasStatus_t status =
      cublaslt().algo_init(terms.handle, terms.compute, CUDA_R_32F, a, b, c, d, id, &algorithm);
  if (status != CUBLAS_STATUS_SUCCESS) return std::nullopt;
  return algorithm;
}

// The ids that the algorithm offers for a knob; {0} ("undefined") where it has no such knob.
std::vector<int32_t> offered(const cublasLtMatmulAlgo_t& algorithm,
                             cublasLtMatmulAlgoCapAttributes_t capability) {
  size_t bytes = 0;
  cublaslt().algo_capability(&algorithm, capability, nullptr, 0, &bytes);
  std::vector<int32_t> ids(bytes / sizeof(int32_t));
  if (ids.empty()) return {0};
  check(cublaslt().algo_capability(&algorithm, capability, ids.data(), bytes, &bytes), kOp,
        "cublasLtMatmulAlgoCapGetAttribute");
  return ids;
}

// All values from 0 to the largest that the algorithm knows, and at most `limit`.
std::vector<int32_t> up_to(const cublasLtMatmulAlgo_t& algorithm,
                           cublasLtMatmulAlgoCapAttributes_t capability, int32_t limit) {
  int32_t largest = 0;
  size_t bytes = 0;
  cublaslt().algo_capability(&algorithm, capability, &largest, sizeof largest, &bytes);
  const auto values = std::views::iota(0, std::min(largest, limit) + 1);
  return {values.begin(), values.end()};
}

// The workspace that the algorithm needs on these terms; nothing if it cannot run on them.
std::optional<int64_t> needed_bytes(const GemmTerms& terms, const cublasLtMatmulAlgo_t& algorithm) {
  cublasLtMatmulHeuristicResult_t result{};
  const auto& [a, b, c, d] = terms.layouts;
  const cublasStatus_t status =
      cublaslt().algo_check(terms.handle, terms.desc, a, b, c, d, &algorithm, &result);
  if (status != CUBLAS_STATUS_SUCCESS) return std::nullopt;
  return static_cast<int64_t>(result.workspaceSize);
}

bool loses_terms(const GemmTerms& terms, const GemmAlgorithm& description) {
  return split_loses_terms(terms.operands, terms.k, description[kSplitK]);
}

// All guesses of the heuristic, at most `limit`.
std::vector<cublasLtMatmulAlgo_t> ask(const GemmTerms& terms, MatmulAlignment alignment,
                                      int limit) {
  const MatmulPreference preference(terms.workspace_bytes, alignment);
  std::vector<cublasLtMatmulHeuristicResult_t> results(static_cast<size_t>(limit));
  int found = 0;
  const auto& [a, b, c, d] = terms.layouts;
  const cublasStatus_t status = cublaslt().heuristic(
      terms.handle, terms.desc, a, b, c, d, preference.get(), limit, results.data(), &found);
  // For some combinations that no kernel supports, cuBLASLt returns INVALID_VALUE.
  if (status != CUBLAS_STATUS_NOT_SUPPORTED && status != CUBLAS_STATUS_INVALID_VALUE)
    check(status, kOp, "cublasLtMatmulAlgoGetHeuristic");
  std::vector<cublasLtMatmulAlgo_t> algorithms;
  for (const auto& result : std::views::take(results, found))
    if (result.state == CUBLAS_STATUS_SUCCESS) algorithms.push_back(result.algo);
  return algorithms;
}

// The same algorithm with fewer parts of k, so that it loses no terms.
std::optional<cublasLtMatmulAlgo_t> with_fewer_parts(const GemmTerms& terms,
                                                     const cublasLtMatmulAlgo_t& algorithm) {
  GemmAlgorithm description = describe_algorithm(algorithm);
  while (--description[kSplitK] > 0) {
    if (description[kSplitK] == 1) description[kReduction] = CUBLASLT_REDUCTION_SCHEME_NONE;
    if (const auto built = build_algorithm(terms, description)) return built;
  }
  return std::nullopt;
}

}  // namespace

std::ostream& operator<<(std::ostream& out, const GemmProblem& p) {
  const auto word = [](bool value) { return value ? "true" : "false"; };
  out << '{' << p.m << ", " << p.n << ", " << p.k << ", " << enumerator(p.a) << ", "
      << enumerator(p.b) << ", " << enumerator(p.d) << ", " << word(p.a_transposed) << ", "
      << word(p.b_transposed) << ", " << word(p.fast_accumulation);
  if (p.a_blocks != ScaleBlocks::Whole || p.adds)
    out << ", " << enumerator(p.a_blocks) << ", " << enumerator(p.b_blocks);
  if (p.adds) out << ", true";
  return out << '}';
}

std::vector<cublasLtMatmulAlgo_t> guess_algorithms(const GemmTerms& terms,
                                                   MatmulAlignment alignment, int limit) {
  constexpr int kMore = 32;
  const auto loses = [&](const auto& guess) {
    return loses_terms(terms, describe_algorithm(guess));
  };
  auto guesses = ask(terms, alignment, limit);
  if (std::ranges::all_of(guesses, loses)) guesses = ask(terms, alignment, std::max(limit, kMore));
  std::vector<cublasLtMatmulAlgo_t> right;
  for (const auto& guess : guesses)
    if (!loses(guess)) right.push_back(guess);
  for (size_t i = 0; right.empty() && i < guesses.size(); ++i)
    if (const auto other = with_fewer_parts(terms, guesses[i])) right.push_back(*other);
  if (right.size() > static_cast<size_t>(limit)) right.resize(static_cast<size_t>(limit));
  return right;
}

GemmAlgorithm describe_algorithm(const cublasLtMatmulAlgo_t& algorithm) {
  GemmAlgorithm description{};
  for (size_t i = 0; i < description.size(); ++i) {
    size_t written = 0;  // two-byte attributes fill the low half: the values are little-endian
    check(cublaslt().algo_get(&algorithm, kAlgorithmAttributes[i].name, &description[i],
                              kAlgorithmAttributes[i].bytes, &written),
          kOp, "cublasLtMatmulAlgoConfigGetAttribute");
  }
  return description;
}

std::optional<cublasLtMatmulAlgo_t> build_algorithm(const GemmTerms& terms,
                                                    const GemmAlgorithm& description) {
  if (loses_terms(terms, description)) return std::nullopt;
  auto algorithm = initial(terms, description[kId]);
  if (!algorithm) return std::nullopt;
  for (size_t i = 1; i < description.size(); ++i) {
    const auto& [name, bytes] = kAlgorithmAttributes[i];
    if (cublaslt().algo_set(&*algorithm, name, &description[i], bytes) != CUBLAS_STATUS_SUCCESS)
      return std::nullopt;
  }
  const auto needed = needed_bytes(terms, *algorithm);
  if (!needed || *needed > terms.workspace_bytes) return std::nullopt;
  return algorithm;
}

bool fits(const GemmTerms& terms, const cublasLtMatmulAlgo_t& algorithm) {
  if (loses_terms(terms, describe_algorithm(algorithm))) return false;
  const auto needed = needed_bytes(terms, algorithm);
  return needed && *needed <= terms.workspace_bytes;
}

int64_t workspace_bytes(const GemmTerms& terms, const cublasLtMatmulAlgo_t& algorithm,
                        bool counts_tiles) {
  if (counts_tiles) return terms.workspace_bytes;
  constexpr size_t kVersionMeasured = 130000;  // what older ones do without a workspace is unknown
  constexpr int64_t kCounterBytes = sizeof(int32_t);
  // Where k is split, blocks may count finished parts of a tile in the workspace, too.
  const bool splits = describe_algorithm(algorithm)[kSplitK] > 1;
  const bool counter = !splits && needed_bytes(terms, algorithm) == kCounterBytes;
  return counter && cublaslt().version() >= kVersionMeasured ? 0 : terms.workspace_bytes;
}

std::vector<GemmAlgorithm> neighbours_of(const GemmTerms& terms, const GemmAlgorithm& description) {
  const auto algorithm = initial(terms, description[kId]);
  if (!algorithm) return {};
  constexpr int32_t kMostCustomOptions = 15;
  constexpr int32_t kMostClusters = CUBLASLT_CLUSTER_SHAPE_1x16x1;
  const auto clusters = std::views::iota(0, kMostClusters + 1);
  const std::array<std::pair<Knob, std::vector<int32_t>>, 5> knobs{{
      {kTile, offered(*algorithm, CUBLASLT_ALGO_CAP_TILE_IDS)},
      {kStages, offered(*algorithm, CUBLASLT_ALGO_CAP_STAGES_IDS)},
      {kTileOrder, up_to(*algorithm, CUBLASLT_ALGO_CAP_CTA_SWIZZLING_SUPPORT, 1)},
      {kCustom, up_to(*algorithm, CUBLASLT_ALGO_CAP_CUSTOM_OPTION_MAX, kMostCustomOptions)},
      {kCluster, {clusters.begin(), clusters.end()}},
  }};
  std::vector<GemmAlgorithm> neighbours;
  for (const auto& [knob, values] : knobs) {
    for (const int32_t value : values) {
      GemmAlgorithm changed = description;
      changed[knob] = value;
      if (changed != description && build_algorithm(terms, changed)) neighbours.push_back(changed);
    }
  }
  return neighbours;
}

}  // namespace te::cuda
