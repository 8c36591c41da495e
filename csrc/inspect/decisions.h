// Routing calls: asks features whether they act in an iteration, and caches their answers. An
// answer may name the next iteration at which to ask again. Until then the feature is not asked,
// and its answer counts as no. Only the answer to whether a GEMM runs in FP8 stays valid until
// then.
#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <string_view>
#include <unordered_map>
#include <vector>

#include "inspect/callouts.h"
#include "inspect/fork_mutex.h"
#include "inspect/routing.h"

namespace te::inspect {

// The answers of all features of a target, and the merged answer.
struct Decision {
  bool yes = false;
  std::optional<int64_t> next;  // first iteration at which a feature is asked again; none: never
  bool once = false;            // the decision is valid for one iteration only
  Route route;
  std::vector<bool> said;  // the answer of every use of the route
};

// Merges the answers of all features. A tensor is inspected or modified if any feature says yes; a
// GEMM runs in FP8 if all features say yes. Without features there is no inspection and no
// modification, and GEMMs run in FP8.
bool merged(std::string_view api, const std::vector<bool>& said);

class Decisions {
 public:
  // Returns the decision for a target. Asks only those features whose answers have expired, or were
  // given for a later iteration (programs may set the iteration back). Calls in one iteration share
  // the answers.
  std::shared_ptr<const Decision> decide(const Target& target, const Route& route,
                                         int64_t iteration, FeatureCall& features);

 private:
  struct Entry {
    std::vector<std::optional<int64_t>> until;  // when the answer of a use expires; none: never
    int64_t from = 0;                           // the iteration of the decision
    std::shared_ptr<const Decision> decision;

    bool holds(int64_t iteration) const;
  };

  ForkMutex mutex_;
  std::unordered_map<Target, Entry, TargetHash> entries_;
};

}  // namespace te::inspect
