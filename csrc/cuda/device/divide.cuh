// Integer division of indices.
#pragma once

#include <cstdint>

namespace te::cuda {

struct Quotient {
  int64_t quotient, remainder;
};

// A 64-bit division costs a hundred instructions, so numbers that fit into 32 bits are divided as
// such.
__device__ __forceinline__ Quotient divide_by(int64_t value, int64_t divisor) {
  if ((static_cast<uint64_t>(value | divisor) >> 32) == 0) {
    const auto small = static_cast<uint32_t>(value), by = static_cast<uint32_t>(divisor);
    return {small / by, small % by};
  }
  return {value / divisor, value % divisor};
}

}  // namespace te::cuda
