// `layers:` of a section -> Selector.
#pragma once

#include "inspect/place.h"
#include "inspect/selector.h"

namespace te::inspect {

Selector read_selector(const Node& layers, const Place& place, const RegexSearch& regex);

}  // namespace te::inspect
