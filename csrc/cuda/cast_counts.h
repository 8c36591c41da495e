// cast_moments without squared errors, which it leaves NaN.
#pragma once

#include "ops/moments.h"

namespace te::cuda {

void cast_counts(const CastMomentsArgs& args, Stream stream);

}  // namespace te::cuda
