// Thread-block clusters: the barrier of all threads of a cluster, and stores into the shared memory
// of its other blocks.
#pragma once

#include "cuda/device/async_copy.cuh"

namespace te::cuda {

// Stores before an arrive are seen after the matching wait, stores to global memory too: it waits
// for those, so it does not belong into a loop that writes results.
__device__ __forceinline__ void cluster_arrive() {
  asm volatile("barrier.cluster.arrive.release.aligned;" ::: "memory");
}

// Says only that this block runs, which must be known before its shared memory is written to.
__device__ __forceinline__ void cluster_arrive_relaxed() {
  asm volatile("barrier.cluster.arrive.relaxed.aligned;" ::: "memory");
}

__device__ __forceinline__ void cluster_wait() {
  asm volatile("barrier.cluster.wait.acquire.aligned;" ::: "memory");
}

// The address that `local`, in this block's shared memory, has in block `rank` of the cluster.
__device__ __forceinline__ uint32_t remote_address(const void* local, uint32_t rank) {
  uint32_t remote;
  asm volatile("mapa.shared::cluster.u32 %0, %1, %2;"
               : "=r"(remote)
               : "r"(shared_address(local)), "r"(rank));
  return remote;
}

// Stores and counts its 8 bytes on `barrier`, in the same block as `address`; ordered by nothing
// but that barrier.
__device__ __forceinline__ void store_remote_async(uint32_t address, float2 value,
                                                   uint32_t barrier) {
  asm volatile(
      "st.async.shared::cluster.mbarrier::complete_tx::bytes.v2.f32 [%0], {%1, %2}, [%3];" ::"r"(
          address),
      "f"(value.x), "f"(value.y), "r"(barrier)
      : "memory");
}

__device__ __forceinline__ void store_remote(uint32_t address, float4 value) {
  asm volatile("st.shared::cluster.v4.f32 [%0], {%1, %2, %3, %4};" ::"r"(address), "f"(value.x),
               "f"(value.y), "f"(value.z), "f"(value.w)
               : "memory");
}

// wait_barrier for a barrier on which other blocks count.
__device__ __forceinline__ void wait_cluster_barrier(uint64_t* barrier, uint32_t phase) {
  asm volatile(
      "{\n"
      ".reg .pred done;\n"
      "again:\n"
      "mbarrier.try_wait.parity.acquire.cluster.shared::cta.b64 done, [%0], %1;\n"
      "@!done bra again;\n"
      "}\n" ::"r"(shared_address(barrier)),
      "r"(phase)
      : "memory");
}

}  // namespace te::cuda
