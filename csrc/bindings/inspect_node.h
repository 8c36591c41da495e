// Python's plain values <-> Node and text.
#pragma once

#include <pybind11/pybind11.h>

#include <string>
#include <string_view>

#include "inspect/node.h"

namespace te::bindings {

pybind11::object to_python(const inspect::Node& node);

// dict, list, tuple, str, bool, int, float, None, and paths as str. Throws TypeError naming the
// place of anything else.
inspect::Node from_python(const pybind11::handle& value, const std::string& path = "");

// Throws TypeError unless the value is a str, and ValueError if it has a lone surrogate, which is
// no character and has no UTF-8.
std::string text_of(const pybind11::handle& value, std::string_view op, std::string_view where);

}  // namespace te::bindings
