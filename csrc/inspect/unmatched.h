// Sections whose selectors select nothing, in words.
#pragma once

#include <string>
#include <string_view>
#include <vector>

#include "inspect/config.h"

namespace te::inspect {

// "layer_types [fc1, fc2]"
std::string describe(const Selector& selector);

// At most three of the layers, those most like the text first: the fewest edits between the text
// and a part of the name.
std::vector<std::string> near_misses(std::string_view text, const std::vector<std::string>& layers);

// One sentence on a section that selected none of the layers.
std::string explain_unmatched(const Section& section, const std::vector<std::string>& layers);

}  // namespace te::inspect
