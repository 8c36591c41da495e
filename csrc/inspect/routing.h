// Finds the features that act on a target: sections that select its layer, their features, and the
// configuration of each for its tensor and gemm. Nothing of it changes in a session, so it is
// cached.
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
  std::optional<Schedule> schedule;  // if its rule has one
};

// In file order. It is shared and never changed: pointers into it stay valid during the session.
using Route = std::shared_ptr<const std::vector<RoutedUse>>;

class Router {
 public:
  // `config`, `registry` and `features` must outlive the router.
  Router(const Config& config, const Registry& registry, RegexSearch regex, FeatureCall& features);

  // The features of the target's namespace that have its method and are configured for its layer,
  // tensor and gemm. Throws Error (Value) if two sections apply the same feature to them, or two
  // features that conflict.
  Route route(const Target& target);

  // The enabled sections that select the layer, by their index.
  std::vector<int> sections_of(const std::string& layer);

  // Layers of all targets so far, in the order of their first appearance.
  std::vector<std::string> layers() const;
  // Enabled sections that select none of these layers.
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
