// What a build with CUDA can tell about itself and the machine; no_cuda.cpp answers for one
// without.
#pragma once

#include <string>

#include "core/tensor_view.h"
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

// Waits for the work of the default stream, whose memory `t` may have been, and zeroes `t`. Is no
// part of a CUDA graph, also where the current stream is captured.
void zero_at_once(const TensorView& t);

}  // namespace te::cuda
