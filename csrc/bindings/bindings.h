// What module.cpp calls for the ops. Each family has a file bind_<family>.cpp with a function
// `void bind_<family>(pybind11::module_&)`; CMake writes the calls from the names of these files.
#pragma once

#include <pybind11/pybind11.h>

namespace te::bindings {

void bind_ops(pybind11::module_& m);

}  // namespace te::bindings
