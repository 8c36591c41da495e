// bind_ops() binds all ops. Each family of ops has a file bind_<family>.cpp with a function
// `void bind_<family>(pybind11::module_&)`, and CMake generates bind_ops() from the names of these
// files.
#pragma once

#include <pybind11/pybind11.h>

namespace te::bindings {

void bind_ops(pybind11::module_& m);

}  // namespace te::bindings
