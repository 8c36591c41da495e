// The plan of a configuration: on which layers, GEMMs and tensors each feature would act. The
// command `check` prints it.
#pragma once

#include <string>
#include <vector>

#include "inspect/config.h"

namespace te::inspect {

// One feature of one enabled section.
struct Plan {
  // A name is empty if the feature does not distinguish gemms (or tensors).
  struct Target {
    std::string gemm, tensor;
    Schedule schedule;
  };

  std::string section, ns, feature;
  std::vector<std::string> layers;  // the given layers that the section selects
  std::vector<Target> targets;
};

// Returns the plans of all features, in file order.
std::vector<Plan> plans(const Config& config, const std::vector<FeatureRule>& rules,
                        const std::vector<std::string>& layers, const RegexSearch& regex);

}  // namespace te::inspect
