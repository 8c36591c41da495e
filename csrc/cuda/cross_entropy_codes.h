// The gradient of cross entropy in FP8, both ways, in one pass over the logits.
#pragma once

#include "ops/cross_entropy.h"

namespace te::cuda {

void cross_entropy_codes(const CrossEntropyBackwardArgs& args, Stream stream);

}  // namespace te::cuda
