// The bytes of a tensor; its rows, and those that are written, may have gaps between them.
#pragma once

#include "core/tensor_view.h"
#include "ops/rows.h"

namespace te {

// Both have the same sizes, dtype and device. One of them is contiguous.
void copy(const TensorView& x, const TensorView& out, Stream stream);

namespace cpu {
void copy(const Rows& x, const Rows& out);
}
namespace cuda {
void copy(const Rows& x, const Rows& out, Device device, Stream stream);
}

}  // namespace te
