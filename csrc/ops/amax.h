// amax: max |x| (NaN ignored) and, from it, the scale of current scaling; all on the device. To get
// the scale of an amax that ranks have reduced, pass it as x: a tensor of one value.
#pragma once

#include <span>

#include "core/quantized_view.h"

namespace te {

struct AmaxArgs {
  TensorView x;        // any shape, fp32/fp16/bf16, contiguous
  CurrentScale scale;  // `scales` may be absent: then only `amax` is written
};

// All tensors have the same dtype and device. One launch takes up to kAmaxesAtOnce of them, and
// each of these has its own scratch.
constexpr size_t kAmaxesAtOnce = 48;
void amax(std::span<const AmaxArgs> all, Stream stream);

namespace cpu {
void amax(std::span<const AmaxArgs> all);
}  // namespace cpu
namespace cuda {
void amax(std::span<const AmaxArgs> all, Stream stream);
}  // namespace cuda

}  // namespace te
