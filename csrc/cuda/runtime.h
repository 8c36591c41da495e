// Queries and settings of the CUDA backend; no_cuda.cpp defines them for a build without CUDA.
#pragma once

#include <string>

#include "cuda/policy/device_limits.h"

namespace te::cuda {

bool built_with_cuda();

// The limits that kernels and GEMMs keep on device `index`. Throws Kind::Unsupported if this build
// has no code for it.
DeviceLimits limits_of_device(int index);

// Applies to devices whose limits have not been asked for yet, so call it before anything else.
void set_device_switches(const DeviceSwitches& on);

// Sets the file of a library that is opened at first use; "" means the order in dynlib.h. `name` as
// in TE_<NAME>_PATH. A library that is open already stays as it is.
void set_library_path(std::string name, std::string path);

// Lets this thread allocate and synchronise while another thread captures a CUDA graph.
void relax_captures();

}  // namespace te::cuda
