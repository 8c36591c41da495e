// The body of one feature, checked against its rule.
#pragma once

#include <optional>
#include <string_view>
#include <utility>
#include <vector>

#include "inspect/config_path.h"
#include "inspect/selector.h"

namespace te::inspect {

// Keys, values, names of gemms, tensors and statistics, schedules, and what is missing. A statistic
// of another one of `rules` is told where it belongs.
void check_feature(const FeatureUse& use, const FeatureRule& rule,
                   const std::vector<FeatureRule>& rules, const ConfigPath& path,
                   const RegexSearch& regex);

// Every (gemm, tensor) that a body may distinguish; absent where it does not.
std::vector<std::pair<std::optional<std::string_view>, std::optional<std::string_view>>> pairs_of(
    const Node& body);

// Features of one section that act on the same tensor and gemm though they must not: the same one
// under two names, or two that conflict. `rules[i]` is the rule of `uses[i]`.
void check_conflicts(const std::vector<FeatureUse>& uses,
                     const std::vector<const FeatureRule*>& rules, const ConfigPath& section);

}  // namespace te::inspect
