#include "inspect/routing.h"

#include <algorithm>
#include <set>

#include "core/error.h"
#include "inspect/gemm_names.h"

namespace te::inspect {

namespace {

using Names = std::vector<std::optional<std::string>>;

// The gemms (or tensors) that a call may mean: the one that it has; if it has none, all of them if
// a configuration distinguishes them, else one case without a name.
template <size_t n>
Names candidates(const std::optional<std::string>& carried, bool told_apart,
                 const std::array<std::string_view, n>& all) {
  if (carried || !told_apart) return {carried};
  return Names(all.begin(), all.end());
}

bool names_any(const FeatureUse& use, std::string_view list, std::string_view items) {
  return use.body.find(list) || use.body.find(items);
}

// Describes a tensor and gemm on which both uses act, if there is one.
std::optional<std::string> overlap(const FeatureUse& one, const FeatureRule& one_rule,
                                   const FeatureUse& other, const FeatureRule& other_rule,
                                   const Target& target) {
  const auto named = [&](std::string_view list, std::string_view items) {
    return names_any(one, list, items) || names_any(other, list, items);
  };
  for (const auto& gemm : candidates(target.gemm, named("gemms", "gemms_struct"), kGemms)) {
    for (const auto& tensor :
         candidates(target.tensor, named("tensors", "tensors_struct"), kTensors)) {
      if (config_for(one, one_rule, gemm, tensor) && config_for(other, other_rule, gemm, tensor)) {
        return describe({target.ns, target.api, target.layer, tensor, gemm});
      }
    }
  }
  return std::nullopt;
}

bool exclude_each_other(const FeatureRule& one, const FeatureRule& other) {
  const auto names = [](const FeatureRule& rule, const std::string& name) {
    return std::ranges::find(rule.conflicts, name) != rule.conflicts.end();
  };
  return one.name == other.name || names(one, other.name) || names(other, one.name);
}

std::string way_out(const FeatureRule& one, const FeatureRule& other) {
  const bool statistics = one.name == other.name && !one.statistics.empty();
  return concat(statistics ? "put the statistics in one section, or " : "",
                "give the sections different layers");
}

}  // namespace

Router::Router(const Config& config, const Registry& registry, RegexSearch regex,
               FeatureCall& features)
    : config_(config), registry_(registry), regex_(std::move(regex)), features_(features) {}

Route Router::route(const Target& target) {
  {
    const std::lock_guard lock(mutex_);
    if (const auto found = routes_.find(target); found != routes_.end()) return found->second;
  }
  auto computed = std::make_shared<const std::vector<RoutedUse>>(compute(target));
  const std::lock_guard lock(mutex_);
  return routes_.try_emplace(target, std::move(computed)).first->second;  // the first thread wins
}

std::vector<int> Router::sections_of(const std::string& layer) {
  {
    const std::lock_guard lock(mutex_);
    if (const auto found = sections_.find(layer); found != sections_.end()) return found->second;
  }
  std::vector<int> selected;
  for (size_t i = 0; i < config_.sections.size(); ++i) {
    const Section& section = config_.sections[i];
    if (section.enabled && section.selector.matches(layer, regex_))
      selected.push_back(static_cast<int>(i));
  }
  const std::lock_guard lock(mutex_);
  const auto [place, added] = sections_.try_emplace(layer, std::move(selected));
  if (added) layers_.push_back(layer);
  return place->second;
}

std::vector<RoutedUse> Router::compute(const Target& target) {
  std::vector<RoutedUse> result;
  std::vector<const FeatureUse*> uses;
  for (const int section : sections_of(target.layer)) {
    for (const FeatureUse& use : config_.sections[section].uses) {
      if (use.ns != target.ns) continue;
      if (auto one = routed(use, target)) {
        result.push_back(std::move(*one));
        uses.push_back(&use);
      }
    }
  }
  check(uses, target);
  return result;
}

std::optional<RoutedUse> Router::routed(const FeatureUse& use, const Target& target) {
  const Feature* feature = registry_.find(use.ns, use.feature);
  if (!feature || !feature->apis.contains(target.api)) return std::nullopt;
  std::optional<Node> config = feature->parsing == Parsing::Feature
                                   ? features_.parse(feature->id, use.body, target)
                                   : config_for(use, feature->rule, target.gemm, target.tensor);
  if (!config) return std::nullopt;
  RoutedUse result{feature, config_.sections[use.section].name, {}, std::nullopt};
  if (feature->rule.scheduled) result.schedule = schedule_of(*config);
  result.config = feature->parsing == Parsing::Nobody ? use.body : std::move(*config);
  return result;
}

void Router::check(const std::vector<const FeatureUse*>& uses, const Target& target) {
  for (size_t i = 0; i < uses.size(); ++i) {
    for (size_t j = 0; j < i; ++j) {
      const FeatureRule& later = registry_.find(uses[i]->ns, uses[i]->feature)->rule;
      const FeatureRule& earlier = registry_.find(uses[j]->ns, uses[j]->feature)->rule;
      if (!exclude_each_other(earlier, later)) continue;
      const auto shared = overlap(*uses[j], earlier, *uses[i], later, target);
      if (!shared) continue;
      const auto named = [&](const FeatureUse& use) {
        return concat(use.feature, " of section ", config_.sections[use.section].name);
      };
      fail(Kind::Value, "config", "expected one of ", named(*uses[j]), " and ", named(*uses[i]),
           " on ", *shared, ", got both: ", way_out(earlier, later), " (", config_.origin, ")");
    }
  }
}

std::vector<std::string> Router::layers() const {
  const std::lock_guard lock(mutex_);
  return layers_;
}

std::vector<const Section*> Router::unmatched() const {
  const std::lock_guard lock(mutex_);
  std::set<int> matched;
  for (const auto& [layer, sections] : sections_) matched.insert(sections.begin(), sections.end());
  std::vector<const Section*> result;
  for (size_t i = 0; i < config_.sections.size(); ++i) {
    const Section& section = config_.sections[i];
    if (section.enabled && !matched.contains(static_cast<int>(i))) result.push_back(&section);
  }
  return result;
}

}  // namespace te::inspect
