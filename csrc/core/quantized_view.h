// QuantizedView: where a kernel puts FP8 results, and which scale it uses. Any output may be
// absent.
#pragma once

#include "core/tensor_view.h"

namespace te {

// `scales` is the pair that travels with every FP8 tensor: {1 / scale, scale}, fp32 [2].
// A consumer (GEMM, dequantize) reads element 0; element 1 is the scale that was used.
struct QuantizedView {
  DType dtype = DType::Float8E4M3;
  TensorView rowwise;     // [rows, cols], one-byte codes
  TensorView columnwise;  // [cols, rows], the transpose of the same codes
  TensorView scales;      // fp32 [2]: written from `scale`; read where `scale` is absent
  TensorView scale;       // fp32 [1]: delayed scaling's scale, read by the kernel
  TensorView amax;        // fp32 [1]: amax = max(amax, max |x|), NaN ignored; may be absent

  explicit operator bool() const { return rowwise || columnwise; }
};

// Current scaling in the pass that produces a tensor: the last block to finish turns the amax of
// the values (rounded to the activation dtype) into `scales`, and leaves `scratch` zero again.
struct CurrentScale {
  DType dtype = DType::Float8E4M3;
  TensorView scales;   // fp32 [2], written: {1 / scale, scale}; absent: no amax is taken
  TensorView amax;     // fp32 [1], written; may be absent
  TensorView scratch;  // uint32 as int32 [2] {amax bits, block counter}: zero before and after
  float epsilon = 0.0f;
  bool power_of_2 = false;

  explicit operator bool() const { return static_cast<bool>(scales); }
};

}  // namespace te
