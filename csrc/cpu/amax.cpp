// The CPU backend of amax, which defines its results: see ops/amax.h.
#include "ops/amax.h"

#include <cmath>

#include "cpu/row_sink.h"

namespace te::cpu {
namespace {

constexpr int64_t kElementsPerThread = 1 << 17;

void amax_of(const AmaxArgs& args) {
  const float amax = dispatch_high_precision(args.x.dtype, "amax", [&](auto in) {
    using In = typename decltype(in)::type;
    const In* x = args.x.ptr<In>();
    return parallel_max(args.x.numel(), kElementsPerThread, [&](int64_t first, int64_t last) {
      float part = 0.0f;
      for (int64_t i = first; i < last; ++i)
        part = max_ignoring_nan(part, std::fabs(static_cast<float>(x[i])));
      return part;
    });
  });
  keep_current(args.scale, amax);
}

}  // namespace

void amax(std::span<const AmaxArgs> all) {
  for (const AmaxArgs& args : all) amax_of(args);
}

}  // namespace te::cpu
