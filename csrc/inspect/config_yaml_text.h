// Checks of the text for what PyYAML refuses and yaml-cpp accepts. Each throws TextError.
#pragma once

#include <cstddef>
#include <utility>
#include <vector>

#include "inspect/source_text.h"

namespace te::inspect {

// Returns the end of the name of the anchor that begins here. For yaml-cpp a name ends at a space
// or bracket, for PyYAML earlier.
size_t end_of_anchor(const SourceText& source, size_t begin);

// Refuses tabs between tokens, and lines that begin with % and give no version. Quotes and blocks,
// whose ranges are `opaque`, may contain both, and comments may contain tabs.
void reject_tabs_and_directives(const SourceText& source,
                                const std::vector<std::pair<size_t, size_t>>& opaque);

}  // namespace te::inspect
