// What a build with CUDA can tell about itself and the machine; no_cuda.cpp answers for one
// without.
#pragma once

#include <string>

namespace te::cuda {

bool built_with_cuda();
int device_count();  // 0 where there is no driver or no device

// Where a library that is opened at first use lies; "" leaves it to dynlib.h's order. `name` as in
// TE_<NAME>_PATH. Later calls change nothing for a library that is open.
void set_library_path(std::string name, std::string path);

}  // namespace te::cuda
