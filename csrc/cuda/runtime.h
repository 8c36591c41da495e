// What a build with CUDA can tell about itself and the machine; no_cuda.cpp answers for one without.
#pragma once

namespace te::cuda {

bool built_with_cuda();
int device_count();  // 0 where there is no driver or no device

}  // namespace te::cuda
