// What PyYAML refuses and yaml-cpp reads, and the text alone tells. Each throws TextError.
#pragma once

#include <cstddef>
#include <utility>
#include <vector>

#include "inspect/source_text.h"

namespace te::inspect {

// Of an anchor that begins here: the place behind its name. yaml-cpp takes anything up to a space
// or a bracket for the name, PyYAML a part of that.
size_t end_of_anchor(const SourceText& source, size_t begin);

// Tabs between tokens, and lines that begin with % but say no version. In quotes and blocks, whose
// begins and ends are `opaque`, both are text; in comments tabs are.
void reject_tabs_and_directives(const SourceText& source,
                                const std::vector<std::pair<size_t, size_t>>& opaque);

}  // namespace te::inspect
