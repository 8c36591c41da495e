// Python's plain values <-> Node.
#pragma once

#include <pybind11/pybind11.h>

#include "inspect/node.h"

namespace te::bindings {

pybind11::object to_python(const inspect::Node& node);

// dict, list, tuple, str, bool, int, float, None, and paths as str. Throws TypeError naming the
// place of anything else.
inspect::Node from_python(const pybind11::handle& value, const std::string& path = "");

}  // namespace te::bindings
