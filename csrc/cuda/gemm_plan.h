// The plan of a GEMM: everything that does not change from call to call, built once and cached.
//
// A call finds its plan by a key, writes the pointers that are in the descriptor (scales and bias)
// and launches. Finding a plan takes less than a microsecond, asking the heuristic 100 to 300. So
// if products of many sizes differ in the number of tokens alone, as those of experts do, only the
// first sizes ask it. All others take the algorithm of a size that is rounded up.
#pragma once

#include <compare>
#include <memory>
#include <mutex>
#include <optional>
#include <unordered_map>

#include "cuda/gemm_algorithm.h"
#include "ops/gemm.h"

namespace te::cuda {

struct GemmKey {
  GemmProblem problem;
  bool has_bias = false;
  bool allow_tf32 = true;
  int32_t device = 0;
  MatmulAlignment alignment;
  int64_t workspace_bytes = 0;
  bool counts_tiles = false;

  explicit GemmKey(const GemmArgs& args);
  auto operator<=>(const GemmKey&) const = default;
};

struct GemmKeyHash {
  size_t operator()(const GemmKey& key) const;
};

// Prints the GEMM in words, for messages.
std::ostream& operator<<(std::ostream& out, const GemmKey& key);

class GemmPlan {
 public:
  // `args` gives the device, which must be current, and the first pointers in the descriptor. If
  // the problem has no row in the table of algorithms, and `similar` is not null, the algorithm of
  // that plan is taken where cuBLASLt accepts it, instead of the heuristic's guess.
  GemmPlan(const GemmKey& key, const GemmArgs& args, const GemmPlan* similar);

  // Launches the GEMM. Not thread-safe, because it writes pointers into the plan's descriptor.
  // Returns false, with nothing done, if cuBLASLt has no kernel for these FP8 operands; for other
  // dtypes the constructor throws.
  bool run(const GemmArgs& args, Stream stream);

  const GemmKey& key() const { return key_; }
  GemmTerms terms() const;
  const cublasLtMatmulAlgo_t& algorithm() const { return algorithm_.value(); }
  void use(const cublasLtMatmulAlgo_t& algorithm);
  // The heuristic's guesses; throws Kind::Unsupported if there is none.
  std::vector<cublasLtMatmulAlgo_t> guesses(int limit) const;

 private:
  void set_pointers(const GemmArgs& args);
  std::optional<cublasLtMatmulAlgo_t> choose(const GemmPlan* similar) const;

  GemmKey key_;
  cublasLtHandle_t handle_;
  cublasComputeType_t compute_;
  MatmulDesc desc_;
  // The layouts of cuBLASLt's operands, column-major: its A is our b, its B is our a.
  MatrixLayout a_, b_, d_;
  std::optional<cublasLtMatmulAlgo_t> algorithm_;
  int64_t workspace_bytes_ = 0;  // that runs are given
};

// All plans of the process. One lock is held while a plan is found, its pointers are set and it is
// launched: the backward runs in another thread than the forward.
class GemmPlanCache {
 public:
  bool run(const GemmArgs& args, Stream stream);

  int64_t built() const;
  // Calls f(plan of the last run) under the lock, for tuning. Throws Kind::Value if there was none.
  template <class F>
  decltype(auto) with_last(F&& f) {
    const std::scoped_lock lock(mutex_);
    require(last_ != nullptr, Kind::Value, "gemm",
            "expected a gemm on CUDA before tuning, got none");
    const DeviceGuard guard({DeviceType::CUDA, last_->key().device});
    return f(*last_);
  }

 private:
  // The plan whose algorithm a new plan takes; null if it asks the heuristic. Makes that plan.
  const GemmPlan* similar_to(const GemmKey& key, const GemmArgs& args);

  mutable std::mutex mutex_;
  std::unordered_map<GemmKey, std::unique_ptr<GemmPlan>, GemmKeyHash> plans_, rounded_;
  // How many plans were made of problems that differ in one size, which is 0 in the key.
  std::unordered_map<GemmKey, int, GemmKeyHash> varied_;
  GemmPlan* last_ = nullptr;
  int64_t built_ = 0;
};

GemmPlanCache& gemm_plans();

}  // namespace te::cuda
