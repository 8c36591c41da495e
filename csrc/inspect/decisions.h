// Routing calls: which features act at an iteration, cached until one of them is to be asked again.
// "Yes, next at n" is a yes for the iteration at hand, then no one is asked before n; only whether
// a GEMM runs in FP8 stays as it was said until then.
#pragma once

#include <cstdint>
#include <memory>
#include <mutex>
#include <optional>
#include <string_view>
#include <unordered_map>
#include <vector>

#include "inspect/callouts.h"
#include "inspect/routing.h"

namespace te::inspect {

// The answers of all features of a target, and what follows from them.
struct Decision {
  bool yes = false;
  std::optional<int64_t> next;  // when a feature is asked again; none: never
  bool once = false;            // the yes is for one iteration
  Route route;
  std::vector<bool> said;  // by every use of the route
};

// An inspect or modify call is wanted if any feature wants it; a GEMM runs in FP8 only if all
// features let it. Without features: no inspection, no modification, FP8.
bool merged(std::string_view api, const std::vector<bool>& said);

class Decisions {
 public:
  // Asks those features whose last answer has run out (or was given for a later iteration: the
  // counter may be set back). Callers of one iteration share the answers.
  std::shared_ptr<const Decision> decide(const Target& target, const Route& route,
                                         int64_t iteration, FeatureCall& features);

 private:
  struct Entry {
    std::vector<std::optional<int64_t>> until;  // by use; none: never
    int64_t from = 0;
    std::shared_ptr<const Decision> decision;

    bool holds(int64_t iteration) const;
  };

  std::mutex mutex_;
  std::unordered_map<Target, Entry, TargetHash> entries_;
};

}  // namespace te::inspect
