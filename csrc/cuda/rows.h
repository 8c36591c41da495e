// A copy of rows by the copy engines or, within a device, by a kernel of the driver.
#pragma once

#include <string_view>

#include "cuda/launch.h"
#include "ops/rows.h"

namespace te::cuda {

// Both must have the same number of rows, with the same number of bytes.
inline void copy_rows(const Rows& from, const Rows& to, cudaStream_t stream, std::string_view op) {
  const auto bytes = static_cast<size_t>(to.bytes), count = static_cast<size_t>(to.count);
  check(count == 1 ? cudaMemcpyAsync(to.data, from.data, bytes, cudaMemcpyDefault, stream)
                   : cudaMemcpy2DAsync(to.data, static_cast<size_t>(to.pitch), from.data,
                                       static_cast<size_t>(from.pitch), bytes, count,
                                       cudaMemcpyDefault, stream),
        op);
}

}  // namespace te::cuda
