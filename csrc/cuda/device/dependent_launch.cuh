// Programmatic dependent launch: the blocks of a kernel are brought onto the multiprocessors while
// the previous kernel of the stream drains, instead of after its end.
//
// Every kernel is started by launch_dependent, or with LaunchAttributes, and all of its threads
// call follow_previous_kernel (or await_previous_kernel) before they access global memory. So no
// kernel ends before the previous one has ended, and every later kernel, also one of another
// library, finds all memory written. Devices without such launches start a kernel when the previous
// one has ended.
#pragma once

#include "cuda/device/architecture.cuh"
#include "cuda/launch.h"

namespace te::cuda {

// Allows the next kernel to start. Once every block of this kernel has called this function, blocks
// of the next kernel may occupy free places on the multiprocessors, where they wait.
__device__ __forceinline__ void admit_next_kernel() {
  if constexpr (kHasClusters) asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
}

// Returns when the previous kernel has ended and all its writes are visible.
__device__ __forceinline__ void await_previous_kernel() {
  if constexpr (kHasClusters) asm volatile("griddepcontrol.wait;" ::: "memory");
}

// Calls both, as early as possible. A kernel that waits for another GPU admits the next kernel
// later: waiting blocks could occupy the places of a kernel that this GPU must run before the other
// GPU can continue.
__device__ __forceinline__ void follow_previous_kernel() {
  admit_next_kernel();
  await_previous_kernel();
}

// The attributes of a launch that the device supports. The launch reads them from this object, so
// it must live until then.
class LaunchAttributes {
 public:
  // `cluster`: the number of blocks of a cluster.
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

// Launches a kernel. The arguments are its launch configuration, then those of the kernel.
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
