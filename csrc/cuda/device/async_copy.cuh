// Asynchronous copies from global to shared memory, which run while the block computes, and the
// mbarrier that tells when they are complete:
//
//   init_barrier(bar): by one thread, followed by __syncwarp or __syncthreads
//   expect_bytes(bar, n): by one thread; then start_copies of n bytes in total, by its warp
//   wait_barrier(bar, phase): by all threads that read; phase is 0, 1, 0, ... from use to use
//
// Addresses and sizes are multiples of 16 bytes. A buffer may be refilled once a barrier of the
// block separates its last reads from the warp that starts the copies.
//
// From compute capability 9.0 on, bulk copies (cp.async.bulk) move each piece as a whole, and the
// barrier counts bytes. On older GPUs each lane copies 16 bytes at a time (cp.async), and the
// barrier counts the 32 lanes.
#pragma once

#include <cstdint>

#include "cuda/device/architecture.cuh"

namespace te::cuda {

struct CopyPiece {
  void* to;  // shared
  const void* from;
  uint32_t bytes;
};

__device__ __forceinline__ uint32_t shared_address(const void* pointer) {
  return static_cast<uint32_t>(__cvta_generic_to_shared(pointer));
}

// `arrivals`: how many arrivals complete a phase. The default is what the copies make: one by
// expect_bytes, or on older GPUs one by each lane of the warp.
__device__ __forceinline__ void init_barrier(uint64_t* barrier,
                                             uint32_t arrivals = kHasClusters ? 1 : 32) {
  asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(shared_address(barrier)),
               "r"(arrivals)
               : "memory");
  if constexpr (kHasClusters) {
    // Bulk copies and the other blocks of a cluster must see the barrier as initialised.
    asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
    asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
  }
}

// Arrives at the barrier. Threads that wait on it then see what this thread has stored before.
__device__ __forceinline__ void arrive(uint64_t* barrier) {
  asm volatile(
      "{\n"
      ".reg .b64 state;\n"
      "mbarrier.arrive.shared::cta.b64 state, [%0];\n"
      "}\n" ::"r"(shared_address(barrier))
      : "memory");
}

__device__ __forceinline__ void expect_bytes(uint64_t* barrier, uint32_t bytes) {
  if constexpr (kHasClusters)
    asm volatile(
        "mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(shared_address(barrier)),
        "r"(bytes)
        : "memory");
}

__device__ __forceinline__ void wait_barrier(uint64_t* barrier, uint32_t phase) {
  if constexpr (kHasClusters)
    asm volatile(
        "{\n"
        ".reg .pred done;\n"
        "again:\n"
        "mbarrier.try_wait.parity.shared::cta.b64 done, [%0], %1;\n"
        "@!done bra again;\n"
        "}\n" ::"r"(shared_address(barrier)),
        "r"(phase)
        : "memory");
  else
    asm volatile(
        "{\n"
        ".reg .pred done;\n"
        "again:\n"
        "mbarrier.test_wait.parity.shared::cta.b64 done, [%0], %1;\n"
        "@!done bra again;\n"
        "}\n" ::"r"(shared_address(barrier)),
        "r"(phase)
        : "memory");
}

__device__ __forceinline__ void bulk_copy(const CopyPiece& piece, uint64_t* barrier) {
  asm volatile(
      "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::
          "r"(shared_address(piece.to)),
      "l"(piece.from), "r"(piece.bytes), "r"(shared_address(barrier))
      : "memory");
}

// Starts a copy by this thread; arrive_with_copies signals its end.
__device__ __forceinline__ void copy_16_bytes(uint32_t to, const void* from) {
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(to), "l"(from) : "memory");
}

// Arrives when this thread's copies have ended.
__device__ __forceinline__ void arrive_with_copies(uint64_t* barrier) {
  asm volatile("cp.async.mbarrier.arrive.noinc.shared::cta.b64 [%0];" ::"r"(shared_address(barrier))
               : "memory");
}

// Lane `lane` of a warp copies its share of a piece.
__device__ __forceinline__ void copy_share(const CopyPiece& piece, uint32_t lane) {
  const auto* from = static_cast<const uint8_t*>(piece.from);
#pragma unroll 4
  for (uint32_t at = 16 * lane; at < piece.bytes; at += 16 * 32)
    copy_16_bytes(shared_address(piece.to) + at, from + at);
}

// Starts the copies piece(0) to piece(count - 1). All lanes of one warp call it. Pieces of 0 bytes
// are skipped.
template <class Piece>
__device__ __forceinline__ void start_copies(int count, uint64_t* barrier, Piece&& piece) {
  const unsigned lane = threadIdx.x % 32;
  if constexpr (kHasClusters) {
#pragma unroll 1
    for (int i = static_cast<int>(lane); i < count; i += 32)
      if (const CopyPiece copy = piece(i); copy.bytes > 0) bulk_copy(copy, barrier);
  } else {
#pragma unroll 1
    for (int i = 0; i < count; ++i) copy_share(piece(i), lane);
    arrive_with_copies(barrier);
  }
}

}  // namespace te::cuda
