// The bytes of a tensor, into rows that may have gaps between them.
#pragma once

#include "core/tensor_view.h"
#include "ops/rows.h"

namespace te {

// Both have the same sizes, dtype and device; x is contiguous.
void copy(const TensorView& x, const TensorView& out, Stream stream);

namespace cuda {
void copy(const TensorView& x, const Rows& out, Stream stream);
}

}  // namespace te
