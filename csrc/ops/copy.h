// copy: out = x, byte by byte. Rows of both tensors may have gaps between them.
#pragma once

#include "core/tensor_view.h"
#include "ops/rows.h"

namespace te {

// Both have the same sizes, dtype and device. One is contiguous, or both have rows of one length.
void copy(const TensorView& x, const TensorView& out, Stream stream);

namespace cpu {
void copy(const Rows& x, const Rows& out);
}
namespace cuda {
void copy(const Rows& x, const Rows& out, Device device, Stream stream);
}

}  // namespace te
