// Split-K: several blocks compute the same tile of a product, each over a part of k, and their sums
// are added. Arithmetic without CUDA, so that a CPU test can check it (tests/cpp/split_k_test.cpp).
#pragma once

#include "core/dtype.h"

namespace te::cuda {

// Whether cuBLASLt may leave out the last terms of all sums if it divides k into `parts`.
//
// A kernel goes through k in tiles. cuBLASLt 12.8 to 13.2 gives every part the same number of whole
// tiles, rounded up. If the division leaves no remainder, no part reaches the terms after the last
// whole tile: with 64 values per tile, k = 8193 in two parts loses the last term. The number of
// values per tile is a property of the kernel, at most 128 bytes, so all numbers are considered.
constexpr bool split_loses_terms(DType operands, int64_t k, int32_t parts) {
  constexpr int64_t kFewest = 16, kMostBytes = 128;
  if (parts < 2) return false;
  for (int64_t tile = kFewest; tile * size_of(operands) <= kMostBytes; tile *= 2)
    if (k % tile != 0 && k / tile % parts == 0) return true;
  return false;
}

}  // namespace te::cuda
