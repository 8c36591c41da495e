// cast: y = x, or factor * x in fp32, in another dtype of high precision, rounded to nearest even.
#pragma once

#include "core/tensor_view.h"

namespace te {

struct CastArgs {
  TensorView x;       // fp32/fp16/bf16, contiguous
  TensorView y;       // shape of x, any of the three dtypes
  TensorView factor;  // fp32, one value; may be absent
};

void cast(const CastArgs& args, Stream stream);

namespace cpu {
void cast(const CastArgs& args);
}
namespace cuda {
void cast(const CastArgs& args, Stream stream);
}

}  // namespace te
