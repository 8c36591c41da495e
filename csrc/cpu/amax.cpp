// The meaning of amax: see ops/amax.h.
#include "ops/amax.h"

#include <cmath>

#include "core/scaling.h"
#include "cpu/parallel_max.h"

namespace te::cpu {
namespace {

constexpr int64_t kElementsPerThread = 1 << 17;

void write_scales(const CurrentScale& rule, float amax) {
  const float scale = current_scale(amax, max_of(rule.dtype), rule.epsilon, rule.power_of_2);
  rule.scales.ptr<float>()[0] = divide(1.0f, scale);
  rule.scales.ptr<float>()[1] = scale;
}

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
  if (args.scale.amax) *args.scale.amax.ptr<float>() = amax;
  if (args.scale) write_scales(args.scale, amax);
}

}  // namespace

void amax(std::span<const AmaxArgs> all) {
  for (const AmaxArgs& args : all) amax_of(args);
}

}  // namespace te::cpu
