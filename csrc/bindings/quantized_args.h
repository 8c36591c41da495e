// Python passes FP8 tensors as flat arguments. These helpers put them into the core's structs.
#pragma once

#include "bindings/tensor_bridge.h"
#include "core/quantized_view.h"
#include "core/scale_blocks.h"

namespace te::bindings {

// The format of an FP8 matrix as one number: its DType, plus 16 if 1 x 128 blocks have scales, or
// plus 32 if 128 x 128 blocks have scales.
inline DType codec_of(int format) { return static_cast<DType>(format % 16); }
inline ScaleBlocks blocks_of(int format) { return static_cast<ScaleBlocks>(format / 16); }

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
