// The gradient of cross entropy as FP8 codes, row-wise and transposed, in one pass over the logits.
#pragma once

#include "ops/cross_entropy.h"

namespace te::cuda {

void cross_entropy_codes(const CrossEntropyBackwardArgs& args, Stream stream);

}  // namespace te::cuda
