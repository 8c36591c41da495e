// The features of the instruction set for which device code is compiled. Host code reads
// current_device_limits() instead (cuda/launch.h), which also knows the limits of the device and
// what was switched off.
#pragma once

namespace te::cuda {

#ifdef __CUDA_ARCH__
inline constexpr int kArchitecture = __CUDA_ARCH__ / 10;  // 10 * major + minor
#else
inline constexpr int kArchitecture = 0;
#endif

inline constexpr bool kHasFp8Conversion = kArchitecture >= 89;
// Clusters of blocks, bulk copies (cp.async.bulk), dependent launch.
inline constexpr bool kHasClusters = kArchitecture >= 90;

// Returns the second argument of __launch_bounds__: how many blocks of `threads` threads must fit
// on a multiprocessor at once, which limits the registers per thread. On Hopper it is `measured`,
// the fastest value (0: the compiler chooses). Other architectures were not measured: they use
// `elsewhere`, a value at which no register spills, or fewer blocks if the multiprocessor has no
// room for so many threads.
constexpr int blocks_sharing(int measured, int elsewhere, int threads) {
  if (kArchitecture == 0 || kArchitecture == 90) return measured;
  constexpr bool kSmall = kArchitecture == 86 || kArchitecture == 89 || kArchitecture == 120;
  constexpr int kMostThreads = kSmall ? 1536 : 2048;
  const int most = kMostThreads / threads;
  return elsewhere < most ? elsewhere : most;
}

}  // namespace te::cuda
