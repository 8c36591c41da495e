// dequantize: x = decode(q) * scales[0], computed in fp32, rounded once to the dtype of x.
#pragma once

#include "core/tensor_view.h"

namespace te {

struct DequantizeArgs {
  TensorView q;  // one-byte codes, contiguous
  DType dtype = DType::Float8E4M3;
  TensorView scales;  // fp32 [1] or [2]; element 0 is 1 / scale
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
