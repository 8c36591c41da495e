// copy: out = x, byte by byte. zero: out = 0. Rows of tensors may have gaps between them.
#pragma once

#include "core/tensor_view.h"
#include "ops/rows.h"

namespace te {

// Both have the same sizes, dtype and device. One is contiguous, or both have rows of one length.
void copy(const TensorView& x, const TensorView& out, Stream stream);

void zero(const TensorView& out, Stream stream);

namespace cpu {
void copy(const Rows& x, const Rows& out);
void zero(const Rows& out);
}  // namespace cpu
namespace cuda {
void copy(const Rows& x, const Rows& out, Device device, Stream stream);
void zero(const Rows& out, Device device, Stream stream);
}  // namespace cuda

}  // namespace te
