// dequantize: x = decode(q) * s, computed in fp32, rounded once to the dtype of x; s is the inverse
// scale of the element: scales[0], or that of its block (core/scale_blocks.h).
#pragma once

#include "core/scale_blocks.h"
#include "core/tensor_view.h"

namespace te {

struct DequantizeArgs {
  TensorView q;  // one-byte codes, contiguous
  DType dtype = DType::Float8E4M3;
  ScaleBlocks blocks = ScaleBlocks::Whole;
  TensorView scales;  // fp32; Whole: [1] or [2], element 0 is 1 / scale
  TensorView x;       // same shape as q, fp32/fp16/bf16
};

void dequantize(const DequantizeArgs& args, Stream stream);

namespace cpu {
void dequantize(const DequantizeArgs& args);
}
namespace cuda {
void dequantize(const DequantizeArgs& args, Stream stream);
}

}  // namespace te
