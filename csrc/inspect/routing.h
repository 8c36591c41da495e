// Router: finds the features that act on a target. It looks for sections that select the layer of
// the target, takes their features, and computes the configuration of each for the tensor and gemm.
// The result does not change during a session, so it is cached.
#pragma once

#include <map>
#include <memory>
#include <optional>
#include <string>
#include <unordered_map>
#include <vector>

#include "inspect/config.h"
#include "inspect/fork_mutex.h"
#include "inspect/registry.h"

namespace te::inspect {

// One feature that acts on a target.
struct RoutedUse {
  const Feature* feature = nullptr;
  std::string section;
  Node config;                       // passed to the feature
  std::optional<Schedule> schedule;  // present if the rule of the feature has a schedule
};

// The features that act on a target, in file order. A route is shared and never changed, so
// pointers into it stay valid during the session.
using Route = std::shared_ptr<const std::vector<RoutedUse>>;

class Router {
 public:
  // `config`, `registry` and `features` must outlive the router.
  Router(const Config& config, const Registry& registry, RegexSearch regex, FeatureCall& features);

  // The features of the target's namespace that have its method and are configured for its layer,
  // tensor and gemm. Throws Error (Value) if two sections apply the same feature, or two features
  // that conflict, to the same tensor and gemm.
  Route route(const Target& target);

  // The indices of the enabled sections that select the layer.
  std::vector<int> sections_of(const std::string& layer);

  // Layers of all targets so far, in the order of their first appearance.
  std::vector<std::string> layers() const;
  // The enabled sections that select none of these layers.
  std::vector<const Section*> unmatched() const;

 private:
  std::vector<RoutedUse> compute(const Target& target);
  std::optional<RoutedUse> routed(const FeatureUse& use, const Target& target);
  void check(const std::vector<const FeatureUse*>& uses, const Target& target);

  const Config& config_;
  const Registry& registry_;
  const RegexSearch regex_;
  FeatureCall& features_;

  mutable ForkMutex mutex_;  // protects the members below
  std::unordered_map<Target, Route, TargetHash> routes_;
  std::map<std::string, std::vector<int>, std::less<>> sections_;
  std::vector<std::string> layers_;
};

}  // namespace te::inspect
