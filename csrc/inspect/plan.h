// What a configuration would do in training, for the command `check`.
#pragma once

#include <string>
#include <vector>

#include "inspect/config.h"

namespace te::inspect {

// One feature of one enabled section.
struct Plan {
  // Empty names: the feature does not distinguish gemms, or tensors.
  struct Target {
    std::string gemm, tensor;
    Schedule schedule;
  };

  std::string section, ns, feature;
  std::vector<std::string> layers;  // the given layers that the section selects
  std::vector<Target> targets;
};

// In file order.
std::vector<Plan> plans(const Config& config, const std::vector<FeatureRule>& rules,
                        const std::vector<std::string>& layers, const RegexSearch& regex);

}  // namespace te::inspect
