// Conversions between Python's plain values and inspect::Node.
#pragma once

#include <pybind11/pybind11.h>

#include <string>
#include <string_view>

#include "inspect/node.h"

namespace te::bindings {

pybind11::object to_python(const inspect::Node& node);

// Converts dict, list, tuple, str, bool, int, float, None, and paths (to strings). Throws TypeError
// with the place of any other value.
inspect::Node from_python(const pybind11::handle& value, const std::string& path = "");

// The UTF-8 text of a str. Throws TypeError for other types, and ValueError for a str with a lone
// surrogate, which has no UTF-8 encoding. `where` is the end of the message.
std::string text_of(const pybind11::handle& value, std::string_view op, std::string_view where);

}  // namespace te::bindings
