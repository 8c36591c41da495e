// Products of small matrices of 16-bit floats on the tensor cores, by a warp. The products of
// elements are exact. They are summed in fp32, but truncated rather than rounded.
#pragma once

#include <type_traits>

#include "core/dtype.h"

namespace te::cuda {

// Adds the product of a 16 x 16 and a 16 x 8 matrix to a 16 x 8 matrix of fp32.
template <class T>
__device__ __forceinline__ void add_product(float (&sums)[4], uint32_t a, uint32_t b, uint32_t c,
                                            uint32_t d, uint32_t upper, uint32_t lower) {
  if constexpr (std::is_same_v<T, Half>)
    asm("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, "
        "{%8, %9}, {%0, %1, %2, %3};"
        : "+f"(sums[0]), "+f"(sums[1]), "+f"(sums[2]), "+f"(sums[3])
        : "r"(a), "r"(b), "r"(c), "r"(d), "r"(upper), "r"(lower));
  else
    asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %5, %6, "
        "%7}, {%8, %9}, {%0, %1, %2, %3};"
        : "+f"(sums[0]), "+f"(sums[1]), "+f"(sums[2]), "+f"(sums[3])
        : "r"(a), "r"(b), "r"(c), "r"(d), "r"(upper), "r"(lower));
}

}  // namespace te::cuda
