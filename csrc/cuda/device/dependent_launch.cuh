// Programmatic dependent launch: a short kernel that follows a long one in its stream is brought up
// while the long one drains, instead of after it.
//
// The short kernel is started by launch_dependent and calls wait_for_previous_kernel before it
// reads or writes anything; all of its threads do, whatever they do then. The long kernel may call
// let_next_kernel_start, which is only about when the next one becomes resident, not about memory.
#pragma once

#include "cuda/launch.h"

namespace te::cuda {

// Returns when the kernel before this one has ended and all it wrote can be seen.
__device__ __forceinline__ void wait_for_previous_kernel() {
  asm volatile("griddepcontrol.wait;" ::: "memory");
}

// Once every block has called it (or has ended), blocks of the next kernel may fill free places.
__device__ __forceinline__ void let_next_kernel_start() {
  asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
}

template <class... Parameters, class... Arguments>
void launch_dependent(void (*kernel)(Parameters...), dim3 grid, dim3 block, cudaStream_t stream,
                      Arguments&&... arguments) {
  cudaLaunchAttribute attribute{};
  attribute.id = cudaLaunchAttributeProgrammaticStreamSerialization;
  attribute.val.programmaticStreamSerializationAllowed = 1;
  cudaLaunchConfig_t config{};
  config.gridDim = grid;
  config.blockDim = block;
  config.stream = stream;
  config.attrs = &attribute;
  config.numAttrs = 1;
  check(cudaLaunchKernelEx(&config, kernel, Parameters(arguments)...), "launch");
}

}  // namespace te::cuda
