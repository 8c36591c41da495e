#include "inspect/plan.h"

#include "inspect/config_feature.h"

namespace te::inspect {

std::vector<Plan> plans(const Config& config, const std::vector<FeatureRule>& rules,
                        const std::vector<std::string>& layers, const RegexSearch& regex) {
  std::vector<Plan> all;
  for (const Section& section : config.sections) {
    for (const FeatureUse& use : section.uses) {
      Plan plan{section.name, use.ns, use.feature, {}, {}};
      for (const std::string& layer : layers) {
        if (section.selector.matches(layer, regex)) plan.layers.push_back(layer);
      }
      const FeatureRule& rule = *find_rule(rules, use.ns, use.feature);
      for (const auto& [gemm, tensor] : pairs_of(use.body)) {
        if (const auto said = config_for(use, rule, gemm, tensor)) {
          plan.targets.push_back({std::string(gemm.value_or("")), std::string(tensor.value_or("")),
                                  schedule_of(*said)});
        }
      }
      all.push_back(std::move(plan));
    }
  }
  return all;
}

}  // namespace te::inspect
