#include "ops/copy.h"

#include <cstring>

namespace te::cpu {

void copy(const Rows& x, const Rows& out) {
  for (int64_t row = 0; row < out.count; ++row)
    std::memcpy(out.data + row * out.pitch, x.data + row * x.pitch, static_cast<size_t>(out.bytes));
}

void zero(const Rows& out) {
  for (int64_t row = 0; row < out.count; ++row)
    std::memset(out.data + row * out.pitch, 0, static_cast<size_t>(out.bytes));
}

}  // namespace te::cpu
