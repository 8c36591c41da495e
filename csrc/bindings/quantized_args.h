// Python hands FP8 outputs over as flat arguments; these helpers put them into the core's structs.
#pragma once

#include "bindings/tensor_bridge.h"
#include "core/quantized_view.h"

namespace te::bindings {

inline TensorView with_format(TensorView codes, DType format) {
  if (codes && size_of(codes.dtype) == 1) codes.dtype = format;  // else the checks refuse it
  return codes;
}

inline QuantizedView quantized_view(const TensorView& rowwise, const TensorView& columnwise,
                                    const TensorView& scales, const TensorView& scale,
                                    const TensorView& amax, DType format) {
  return {format, with_format(rowwise, format), with_format(columnwise, format), scales, scale,
          amax};
}

}  // namespace te::bindings
