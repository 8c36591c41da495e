// Checks the body of one feature in a section (its keys and values) against the rule of the
// feature.
#pragma once

#include <optional>
#include <string_view>
#include <utility>
#include <vector>

#include "inspect/config_path.h"
#include "inspect/selector.h"

namespace te::inspect {

// Checks keys, values, names of gemms, tensors and statistics, schedules, and required keys. If a
// statistic belongs to another feature in `rules`, the message names that feature.
void check_feature(const FeatureUse& use, const FeatureRule& rule,
                   const std::vector<FeatureRule>& rules, const ConfigPath& path,
                   const RegexSearch& regex);

// Every (gemm, tensor) for which a body may have a configuration of its own. The gemm (or tensor)
// is absent if the body does not distinguish gemms (or tensors).
std::vector<std::pair<std::optional<std::string_view>, std::optional<std::string_view>>> pairs_of(
    const Node& body);

// Reports features of one section that must not act on the same tensor and gemm, but do: one
// feature under two names, or two features that conflict. `rules[i]` is the rule of `uses[i]`.
void check_conflicts(const std::vector<FeatureUse>& uses,
                     const std::vector<const FeatureRule*>& rules, const ConfigPath& section);

}  // namespace te::inspect
