// What the instruction set that device code is compiled for has. Host code asks device_limits()
// instead (cuda/device_limits.h), which also knows what the device has and what was switched off.
#pragma once

namespace te::cuda {

#ifdef __CUDA_ARCH__
inline constexpr int kArchitecture = __CUDA_ARCH__ / 10;  // 10 * major + minor
#else
inline constexpr int kArchitecture = 0;
#endif

inline constexpr bool kHasFp8Conversion = kArchitecture >= 89;
// Clusters of blocks, bulk copies by the copy engine, dependent launch.
inline constexpr bool kHasClusters = kArchitecture >= 90;

}  // namespace te::cuda
