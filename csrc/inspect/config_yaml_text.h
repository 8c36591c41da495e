// Checks for texts that PyYAML refuses but yaml-cpp accepts. They throw TextError.
#pragma once

#include <cstddef>
#include <utility>
#include <vector>

#include "inspect/source_text.h"

namespace te::inspect {

// Returns the end of the name of an anchor, whose & is at `begin`. Refuses names with characters
// that PyYAML does not allow: yaml-cpp takes everything up to a space or bracket as the name.
size_t end_of_anchor(const SourceText& source, size_t begin);

// Refuses tabs between tokens, and lines that begin with % but not with "%YAML ". Quoted text and
// block scalars, whose ranges are `opaque`, may contain both, and comments may contain tabs.
void reject_tabs_and_directives(const SourceText& source,
                                const std::vector<std::pair<size_t, size_t>>& opaque);

}  // namespace te::inspect
