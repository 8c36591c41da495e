// Programmatic dependent launch: a kernel that follows another one in its stream is brought up
// while that one drains, instead of after it.
//
// Every kernel is started by launch_dependent, or with LaunchAttributes, and all of its threads
// call follow_previous_kernel (or await_previous_kernel) before they read or write anything. As
// none ends before the one before it has, whoever comes later, of ours or not, finds all memory
// written. Devices that have no such launch bring a kernel up when the one before it has ended.
#pragma once

#include "cuda/device/architecture.cuh"
#include "cuda/launch.h"

namespace te::cuda {

// Once every block is here, blocks of the next kernel may fill free places, where they wait.
__device__ __forceinline__ void admit_next_kernel() {
  if constexpr (kHasClusters) asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
}

// Returns when the kernel before this one has ended and all it wrote can be seen.
__device__ __forceinline__ void await_previous_kernel() {
  if constexpr (kHasClusters) asm volatile("griddepcontrol.wait;" ::: "memory");
}

// Both, as early as possible. Kernels that wait for another GPU admit others later: those would
// take the places of a kernel that this GPU must run before the other one goes on.
__device__ __forceinline__ void follow_previous_kernel() {
  admit_next_kernel();
  await_previous_kernel();
}

// The attributes of a launch, as far as the device has them. They lie in this object, which must
// live until the launch.
class LaunchAttributes {
 public:
  // Of a kernel whose blocks come in clusters of so many.
  explicit LaunchAttributes(const DeviceLimits& device, int cluster = 1) {
    if (device.dependent_launch) {
      cudaLaunchAttribute& dependent = list_[count_++];
      dependent.id = cudaLaunchAttributeProgrammaticStreamSerialization;
      dependent.val.programmaticStreamSerializationAllowed = 1;
    }
    if (cluster > 1) {
      cudaLaunchAttribute& clusters = list_[count_++];
      clusters.id = cudaLaunchAttributeClusterDimension;
      clusters.val.clusterDim = {static_cast<unsigned>(cluster), 1, 1};
    }
  }
  LaunchAttributes(const LaunchAttributes&) = delete;
  LaunchAttributes& operator=(const LaunchAttributes&) = delete;

  void add_to(cudaLaunchConfig_t& config) {
    config.attrs = list_.data();
    config.numAttrs = count_;
  }

 private:
  std::array<cudaLaunchAttribute, 2> list_{};
  unsigned count_ = 0;
};

// Arguments in the order of a plain launch, then those of the kernel.
template <class... Parameters, class... Arguments>
void launch_dependent(void (*kernel)(Parameters...), dim3 grid, dim3 block, size_t shared_bytes,
                      cudaStream_t stream, Arguments&&... arguments) {
  LaunchAttributes attributes(current_device_limits());
  cudaLaunchConfig_t config{};
  config.gridDim = grid;
  config.blockDim = block;
  config.dynamicSmemBytes = shared_bytes;
  config.stream = stream;
  attributes.add_to(config);
  check(cudaLaunchKernelEx(&config, kernel, Parameters(arguments)...), "launch");
}

}  // namespace te::cuda
