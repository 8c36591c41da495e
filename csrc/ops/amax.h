// amax: max |x| (NaN ignored) and, from it, the scale of current scaling; all on the device.
#pragma once

#include <span>

#include "core/quantized_view.h"

namespace te {

struct AmaxArgs {
  TensorView x;        // any shape, fp32/fp16/bf16, contiguous
  CurrentScale scale;  // `scales` may be absent: then only `amax` is written
};

// Of tensors of one dtype on one device. Those of one launch have scratch of their own.
constexpr size_t kAmaxesAtOnce = 48;
void amax(std::span<const AmaxArgs> all, Stream stream);

// The scale alone, from an amax that other ranks have contributed to.
struct ScaleFromAmaxArgs {
  TensorView amax;  // fp32 [1]
  CurrentScale scale;
};

void scale_from_amax(const ScaleFromAmaxArgs& args, Stream stream);

namespace cpu {
void amax(std::span<const AmaxArgs> all);
void scale_from_amax(const ScaleFromAmaxArgs& args);
}  // namespace cpu
namespace cuda {
void amax(std::span<const AmaxArgs> all, Stream stream);
void scale_from_amax(const ScaleFromAmaxArgs& args, Stream stream);
}  // namespace cuda

}  // namespace te
