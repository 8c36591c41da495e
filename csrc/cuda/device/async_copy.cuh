// Bulk copies from global into shared memory by the copy engine, and the barrier on which they end:
//
//   init_barrier(bar) by one thread; then everyone may see it (__syncwarp or __syncthreads)
//   expect_bytes(bar, n) by one thread; bulk_copy(...) of n bytes in all, by any threads
//   wait_barrier(bar, phase) by all who read; phase = 0, 1, 0, ... as the barrier is used again
//
// Addresses and sizes are multiples of 16 bytes. A buffer may be refilled once a barrier of the
// block has separated its last reader from the thread that starts the copy.
#pragma once

#include <cstdint>

namespace te::cuda {

__device__ __forceinline__ uint32_t shared_address(const void* pointer) {
  return static_cast<uint32_t>(__cvta_generic_to_shared(pointer));
}

__device__ __forceinline__ void init_barrier(uint64_t* barrier) {
  asm volatile("mbarrier.init.shared::cta.b64 [%0], 1;" ::"r"(shared_address(barrier)) : "memory");
  // The copy engine and the other blocks of a cluster must see the barrier as initialised.
  asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
  asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
}

__device__ __forceinline__ void expect_bytes(uint64_t* barrier, uint32_t bytes) {
  asm volatile(
      "mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(shared_address(barrier)),
      "r"(bytes)
      : "memory");
}

__device__ __forceinline__ void wait_barrier(uint64_t* barrier, uint32_t phase) {
  asm volatile(
      "{\n"
      ".reg .pred done;\n"
      "again:\n"
      "mbarrier.try_wait.parity.shared::cta.b64 done, [%0], %1;\n"
      "@!done bra again;\n"
      "}\n" ::"r"(shared_address(barrier)),
      "r"(phase)
      : "memory");
}

__device__ __forceinline__ void bulk_copy(void* to, const void* from, uint32_t bytes,
                                          uint64_t* barrier) {
  asm volatile(
      "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::
          "r"(shared_address(to)),
      "l"(from), "r"(bytes), "r"(shared_address(barrier))
      : "memory");
}

}  // namespace te::cuda
