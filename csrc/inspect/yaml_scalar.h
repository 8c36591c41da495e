// The type and value of a plain (unquoted) YAML 1.1 scalar. The rules are those of PyYAML's
// safe_load, because users write their files for it.
#pragma once

#include <string_view>

#include "inspect/node.h"

namespace te::inspect {

// Examples: `yes` and `on` are true, `010` is 8, `1_000` is 1000, `1:30` is 90, `1e3` is a string
// (a float needs a dot, and a sign in an exponent), `~` and an empty text are null. Dates stay
// strings. Throws te::Error for an integer of more than 64 bits.
decltype(Node::value) resolve_plain(std::string_view text);

}  // namespace te::inspect
