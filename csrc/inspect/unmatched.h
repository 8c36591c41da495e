// Messages about sections that select no layer.
#pragma once

#include <string>
#include <string_view>
#include <vector>

#include "inspect/config.h"

namespace te::inspect {

// "layer_types [fc1, fc2]"
std::string describe(const Selector& selector);

// At most three layers whose names have a part that is similar to the text, fewest edits first.
std::vector<std::string> near_misses(std::string_view text, const std::vector<std::string>& layers);

// A message about a section that selects none of the layers, with suggestions.
std::string explain_unmatched(const Section& section, const std::vector<std::string>& layers);

}  // namespace te::inspect
