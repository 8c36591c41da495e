// Reads YAML text into a Node.
#pragma once

#include <string_view>

#include "inspect/node.h"
#include "inspect/source_text.h"

namespace te::inspect {

constexpr int kMaxDepth = 32;        // of nested collections
constexpr size_t kMaxNodes = 10000;  // scalars and collections, after aliases are expanded

// Reads one document of YAML 1.1 as PyYAML's safe_load does, with anchors, aliases and `<<` merges
// expanded. It is stricter than PyYAML: explicit tags, duplicate keys, keys that are not scalars,
// tabs outside of quotes and comments, recursive aliases, a second document, and files beyond the
// limits are errors. An empty file is null. Throws TextError.
Node parse_yaml(std::string_view text);

}  // namespace te::inspect
