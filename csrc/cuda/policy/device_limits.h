// The limits of a device that launch policies and GEMMs keep. Plain arithmetic without CUDA, so
// that a CPU test, and the table of the documentation, can ask for any device.
#pragma once

#include <algorithm>
#include <array>
#include <cstddef>
#include <cstdint>

namespace te::cuda {

inline constexpr size_t kMaxDevices = 64;  // of one process
inline constexpr int kMaxCluster = 8;      // what every device with clusters launches
inline constexpr int kAdaCapability = 89, kHopperCapability = 90;  // 10 * major + minor

// How many clusters of 1, 2, ... blocks a device holds at once; element 0 is not used.
using ClusterCounts = std::array<int, kMaxCluster + 1>;

// What the driver says about the device and about the code of the kernels.
struct DeviceFacts {
  int capability = 0;
  // The capability for which the kernels were compiled: lower if the driver compiled them from
  // portable code (PTX).
  int code = 0;
  int multiprocessors = 0;
  int64_t shared_bytes = 0;  // the most that a block may have
  ClusterCounts clusters{};  // clusters of blocks with all `shared_bytes`; zeros: not known
};

// What the user has not switched off by the environment variables in docs/how-to/gpus.md.
struct DeviceSwitches {
  bool fp8_products = true;
  bool clusters = true;
  bool dependent_launch = true;
  int64_t shared_bytes = 0;  // the most that a block may have; 0: as the device says
};

struct DeviceLimits {
  int capability = 0;
  int code = 0;
  int multiprocessors = 0;
  int64_t shared_bytes = 0;
  int cluster = 1;           // the most blocks of a cluster; 1: there are no clusters
  ClusterCounts clusters{};  // of blocks with a multiprocessor each
  bool dependent_launch = false;
  bool fp8_conversion =
      false;                  // by an instruction; else by integer arithmetic, with the same codes
  bool fp8_products = false;  // cuBLASLt has FP8 GEMMs
  bool block_scales = false;  // cuBLASLt has FP8 GEMMs with scales for blocks of 128

  // How many clusters of `size` blocks run at once, with a multiprocessor for each block.
  constexpr int64_t resident(int size) const { return clusters[static_cast<size_t>(size)]; }

  bool operator==(const DeviceLimits&) const = default;
};

// A cluster runs within one part of the chip (GPC), which on Hopper has 16 or 18 multiprocessors,
// some of which may be disabled. The driver knows how many clusters there is room for. Where it has
// not said so, whole parts of 16 are assumed.
constexpr ClusterCounts clusters_of(const DeviceFacts& facts) {
  ClusterCounts counts = facts.clusters;
  counts[1] = facts.multiprocessors;
  for (int size = 2; size <= kMaxCluster; ++size)
    if (counts[size] == 0) counts[size] = std::max(facts.multiprocessors / 16 * 16 / size, 1);
  return counts;
}

constexpr DeviceLimits limits_of(const DeviceFacts& facts, const DeviceSwitches& on) {
  const int64_t most = on.shared_bytes > 0 ? on.shared_bytes : facts.shared_bytes;
  return {.capability = facts.capability,
          .code = facts.code,
          .multiprocessors = facts.multiprocessors,
          .shared_bytes = std::min(facts.shared_bytes, most),
          .cluster = facts.code >= kHopperCapability && on.clusters ? kMaxCluster : 1,
          .clusters = clusters_of(facts),
          .dependent_launch = facts.code >= kHopperCapability && on.dependent_launch,
          .fp8_conversion = facts.code >= kAdaCapability,
          .fp8_products = facts.capability >= kAdaCapability && on.fp8_products,
          .block_scales = facts.capability == kHopperCapability && on.fp8_products};
}

}  // namespace te::cuda
