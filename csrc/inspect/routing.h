// From a hook to the features that act on it: layer -> sections -> uses -> the configuration of its
// tensor and gemm. Static for a session, so everything is computed once.
#pragma once

#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <unordered_map>
#include <vector>

#include "inspect/config.h"
#include "inspect/registry.h"

namespace te::inspect {

// One feature that acts on a target.
struct RoutedUse {
  const Feature* feature = nullptr;
  std::string section;
  Node config;                       // what the feature is handed
  std::optional<Schedule> schedule;  // of a feature whose rule has one
};

// In file order. Shared, and never changed: pointers to its members are good for the session.
using Route = std::shared_ptr<const std::vector<RoutedUse>>;

class Router {
 public:
  // `config`, `registry` and `features` must outlive the router.
  Router(const Config& config, const Registry& registry, RegexSearch regex, FeatureCall& features);

  // The features of the target's namespace that have its api and are configured for its layer,
  // tensor and gemm. Throws Error (Value) where two sections give a tensor and gemm the same
  // feature, or features that exclude each other.
  Route route(const Target& target);

  // The enabled sections that select the layer, by their index.
  std::vector<int> sections_of(const std::string& layer);

  // Layers asked about so far, in the order of their first appearance.
  std::vector<std::string> layers() const;
  // Enabled sections that selected none of them.
  std::vector<const Section*> unmatched() const;

 private:
  std::vector<RoutedUse> compute(const Target& target);
  std::optional<RoutedUse> routed(const FeatureUse& use, const Target& target);
  void check(const std::vector<const FeatureUse*>& uses, const Target& target);

  const Config& config_;
  const Registry& registry_;
  const RegexSearch regex_;
  FeatureCall& features_;

  mutable std::mutex mutex_;  // of what follows
  std::unordered_map<Target, Route, TargetHash> routes_;
  std::map<std::string, std::vector<int>, std::less<>> sections_;
  std::vector<std::string> layers_;
};

}  // namespace te::inspect
