// The type and value of a plain YAML 1.1 scalar, as in PyYAML's safe_load, for which users' files
// are written.
#pragma once

#include <string_view>

#include "inspect/node.h"

namespace te::inspect {

// `yes`, `on`: true; `010`: 8; `1_000`: 1000; `1:30`: 90; `1e3`: a string (a float needs a dot and
// a signed exponent);
// `~` and nothing: null. Dates stay strings. Throws te::Error for an integer beyond 64 bits.
decltype(Node::value) resolve_plain(std::string_view text);

}  // namespace te::inspect
