// Reads the key `layers` of a section.
#pragma once

#include "inspect/config_path.h"
#include "inspect/selector.h"

namespace te::inspect {

Selector read_selector(const Node& layers, const ConfigPath& path, const RegexSearch& regex);

}  // namespace te::inspect
