// Flags in global memory by which GPUs tell each other what they have written.
#pragma once

#include <cstdint>

namespace te::cuda {

// A thread that reads the flag by load_acquire also sees what this thread has written before.
__device__ __forceinline__ void store_release(uint32_t* flag, uint32_t value) {
  asm volatile("st.release.sys.global.u32 [%0], %1;" ::"l"(__cvta_generic_to_global(flag)),
               "r"(value)
               : "memory");
}

// Reads that follow see what the other GPU wrote before it stored the flag.
__device__ __forceinline__ uint32_t load_acquire(const uint32_t* flag) {
  uint32_t value;
  asm volatile("ld.acquire.sys.global.u32 %0, [%1];"
               : "=r"(value)
               : "l"(__cvta_generic_to_global(flag))
               : "memory");
  return value;
}

}  // namespace te::cuda
