// transpose: out[j, i] = x[i, j] for one-byte codes; x is read as [rows, cols].
#pragma once

#include "core/tensor_view.h"

namespace te {

struct TransposeArgs {
  TensorView x;    // [..., cols], one-byte elements, contiguous
  TensorView out;  // [cols, rows]
};

void transpose(const TransposeArgs& args, Stream stream);

namespace cpu {
void transpose(const TransposeArgs& args);
}
namespace cuda {
void transpose(const TransposeArgs& args, Stream stream);
}

}  // namespace te
