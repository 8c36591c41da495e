// The bytes of a tensor.
#pragma once

#include "core/tensor_view.h"

namespace te {

// Both are contiguous, of the same dtype and size, on the same device.
void copy(const TensorView& x, const TensorView& out, Stream stream);

namespace cuda {
void copy(const TensorView& x, const TensorView& out, Stream stream);
}

}  // namespace te
