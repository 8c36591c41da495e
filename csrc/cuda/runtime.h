// What a build with CUDA can tell about itself and the machine; no_cuda.cpp answers for one
// without.
#pragma once

#include <string>

#include "cuda/policy/device_limits.h"

namespace te::cuda {

bool built_with_cuda();

// What kernels and products may use of device `index`. Throws Kind::Unsupported where this build
// has no code for it.
DeviceLimits limits_of_device(int index);

// Holds for devices that nobody has asked about yet: call it before anything else.
void set_device_switches(const DeviceSwitches& on);

// Where a library that is opened at first use lies; "" leaves it to dynlib.h's order. `name` as in
// TE_<NAME>_PATH. Later calls change nothing for a library that is open.
void set_library_path(std::string name, std::string path);

// From now on this thread may allocate and wait while another one captures a graph.
void relax_captures();

}  // namespace te::cuda
