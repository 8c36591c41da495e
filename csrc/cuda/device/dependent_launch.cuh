// Programmatic dependent launch: a kernel that follows another one in its stream is brought up
// while that one drains, instead of after it.
//
// Every kernel is started by launch_dependent (those in clusters: with
// dependent_cluster_attributes), and all of its threads call follow_previous_kernel before they
// read or write anything. As none ends before the one before it has, whoever comes later, of ours
// or not, finds all memory written.
#pragma once

#include "cuda/launch.h"

namespace te::cuda {

// Returns when the kernel before this one has ended and all it wrote can be seen. Once every block
// is here, blocks of the next kernel may fill free places; they wait in turn.
__device__ __forceinline__ void follow_previous_kernel() {
  asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
  asm volatile("griddepcontrol.wait;" ::: "memory");
}

inline cudaLaunchAttribute dependent_attribute() {
  cudaLaunchAttribute attribute{};
  attribute.id = cudaLaunchAttributeProgrammaticStreamSerialization;
  attribute.val.programmaticStreamSerializationAllowed = 1;
  return attribute;
}

// Of a kernel whose blocks come in clusters of so many.
inline std::array<cudaLaunchAttribute, 2> dependent_cluster_attributes(int cluster) {
  cudaLaunchAttribute clusters{};
  clusters.id = cudaLaunchAttributeClusterDimension;
  clusters.val.clusterDim = {static_cast<unsigned>(cluster), 1, 1};
  return {dependent_attribute(), clusters};
}

// Arguments in the order of a plain launch, then those of the kernel.
template <class... Parameters, class... Arguments>
void launch_dependent(void (*kernel)(Parameters...), dim3 grid, dim3 block, size_t shared_bytes,
                      cudaStream_t stream, Arguments&&... arguments) {
  cudaLaunchAttribute attribute = dependent_attribute();
  cudaLaunchConfig_t config{};
  config.gridDim = grid;
  config.blockDim = block;
  config.dynamicSmemBytes = shared_bytes;
  config.stream = stream;
  config.attrs = &attribute;
  config.numAttrs = 1;
  check(cudaLaunchKernelEx(&config, kernel, Parameters(arguments)...), "launch");
}

}  // namespace te::cuda
