#include "inspect/registry.h"

#include <algorithm>

namespace te::inspect {

size_t TargetHash::operator()(const Target& target) const {
  const std::hash<std::string> hash;
  size_t result = hash(target.layer);
  for (const std::string* part : {&target.ns, &target.api}) result = result * 31 + hash(*part);
  for (const auto* part : {&target.tensor, &target.gemm}) {
    result = result * 31 + (*part ? hash(**part) : 1);
  }
  return result;
}

std::string describe(const Target& target) {
  std::string text = "layer " + target.layer;
  if (target.tensor) text += ", tensor " + *target.tensor;
  if (target.gemm) text += ", gemm " + *target.gemm;
  return text;
}

bool Registry::add(Feature feature) {
  const Feature* found = find(feature.rule.ns, feature.rule.name);
  if (found && found->rule.name == feature.rule.name) return false;
  features_.push_back(std::move(feature));
  return true;
}

void Registry::remove(FeatureId id) {
  std::erase_if(features_, [id](const Feature& f) { return f.id == id; });
}

const Feature* Registry::find(std::string_view ns, std::string_view name) const {
  const Feature* aliased = nullptr;
  for (const Feature& feature : features_) {
    if (feature.rule.ns != ns) continue;
    if (feature.rule.name == name) return &feature;
    const bool is_alias =
        std::ranges::find(feature.rule.aliases, name) != feature.rule.aliases.end();
    if (is_alias && !aliased) aliased = &feature;
  }
  return aliased;
}

const Feature* Registry::find(FeatureId id) const {
  const auto found = std::ranges::find(features_, id, &Feature::id);
  return found == features_.end() ? nullptr : &*found;
}

std::vector<FeatureRule> Registry::rules() const {
  std::vector<FeatureRule> rules;
  for (const Feature& feature : features_) rules.push_back(feature.rule);
  return rules;
}

bool Registry::has_api(std::string_view ns, std::string_view api) const {
  return std::ranges::any_of(
      features_, [&](const Feature& f) { return f.rule.ns == ns && f.apis.contains(api); });
}

}  // namespace te::inspect
