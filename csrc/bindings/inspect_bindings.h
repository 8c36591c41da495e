// The functions that bind the parts of nvdlfw_inspect/_engine, each in a file inspect_<part>.cpp.
#pragma once

#include <pybind11/pybind11.h>

namespace te::bindings {

void bind_engine(pybind11::module_& m);
void bind_session(pybind11::module_& m);

}  // namespace te::bindings
