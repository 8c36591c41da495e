// Thread-block clusters: the barrier of all threads of a cluster, and stores into the shared memory
// of its other blocks. Before compute capability 9.0 there are no clusters, and each block is
// alone.
#pragma once

#include "cuda/device/async_copy.cuh"

namespace te::cuda {

// Stores before the arrive are visible after the matching wait. The barrier waits for stores to
// global memory too, so it does not belong into a loop that writes results.
__device__ __forceinline__ void cluster_arrive() {
  if constexpr (kHasClusters) asm volatile("barrier.cluster.arrive.release.aligned;" ::: "memory");
}

__device__ __forceinline__ void cluster_wait() {
  if constexpr (kHasClusters)
    asm volatile("barrier.cluster.wait.acquire.aligned;" ::: "memory");
  else
    __syncthreads();
}

// The address that `local`, in this block's shared memory, has in block `rank` of the cluster.
__device__ __forceinline__ uint32_t remote_address(const void* local, uint32_t rank) {
  uint32_t remote = shared_address(local);
  if constexpr (kHasClusters)
    asm volatile("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(remote) : "r"(remote), "r"(rank));
  return remote;
}

// Stores `value` in the shared memory of a block of the cluster, and counts its 8 bytes on
// `barrier`, which is in the same block as `address`. Only that barrier orders the store. For
// clusters of several blocks.
__device__ __forceinline__ void store_remote_async(uint32_t address, float2 value,
                                                   uint32_t barrier) {
  if constexpr (kHasClusters)
    asm volatile(
        "st.async.shared::cluster.mbarrier::complete_tx::bytes.v2.f32 [%0], {%1, %2}, [%3];" ::"r"(
            address),
        "f"(value.x), "f"(value.y), "r"(barrier)
        : "memory");
}

// The wait_barrier for a barrier that other blocks of the cluster signal.
__device__ __forceinline__ void wait_cluster_barrier(uint64_t* barrier, uint32_t phase) {
  if constexpr (kHasClusters)
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
