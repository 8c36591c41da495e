// transpose: out[j, i] = x[i, j] for one-byte codes; x is read as [rows, cols]. The inverse scales
// of 128 x 128 blocks can be transposed in the same call.
#pragma once

#include "core/scale_blocks.h"
#include "core/tensor_view.h"

namespace te {

struct TransposeArgs {
  TensorView x;           // [..., cols], one-byte elements, contiguous
  TensorView out;         // [cols, rows]; without scales, rows may have gaps between them
  TensorView scales;      // fp32, of x: see core/scale_blocks.h, Squares; may be absent
  TensorView out_scales;  // fp32, of out, with `scales`; elements that rounding up adds are zero
};

void transpose(const TransposeArgs& args, Stream stream);

// The number of bytes from a row of out to the next.
inline int64_t transpose_pitch(const TransposeArgs& args) {
  return args.out.is_contiguous() ? args.x.rows() : args.out.stride(0);
}

namespace cpu {
void transpose(const TransposeArgs& args);
}
namespace cuda {
void transpose(const TransposeArgs& args, Stream stream);
}

}  // namespace te
