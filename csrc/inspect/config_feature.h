// The body of one feature, checked against its rule.
#pragma once

#include <optional>
#include <string_view>
#include <utility>
#include <vector>

#include "inspect/config_path.h"
#include "inspect/selector.h"

namespace te::inspect {

// Checks keys, values, names of gemms, tensors and statistics, schedules, and required keys. The
// error about a statistic of another feature in `rules` names that feature.
void check_feature(const FeatureUse& use, const FeatureRule& rule,
                   const std::vector<FeatureRule>& rules, const ConfigPath& path,
                   const RegexSearch& regex);

// Every (gemm, tensor) that a body may distinguish; absent if it does not distinguish them.
std::vector<std::pair<std::optional<std::string_view>, std::optional<std::string_view>>> pairs_of(
    const Node& body);

// Reports features of one section that act on the same tensor and gemm and must not: one feature
// under two names, or two that conflict. `rules[i]` is the rule of `uses[i]`.
void check_conflicts(const std::vector<FeatureUse>& uses,
                     const std::vector<const FeatureRule*>& rules, const ConfigPath& section);

}  // namespace te::inspect
