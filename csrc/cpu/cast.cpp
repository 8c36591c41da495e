// The CPU backend of cast, which defines its results: see ops/cast.h.
#include "ops/cast.h"

#include "core/parallel.h"

namespace te::cpu {

void cast(const CastArgs& args) {
  constexpr int64_t kElementsPerThread = 1 << 17;
  dispatch_high_precision(args.x.dtype, "cast", [&](auto in) {
    dispatch_high_precision(args.y.dtype, "cast", [&](auto out) {
      using Out = typename decltype(out)::type;
      const auto* x = args.x.ptr<typename decltype(in)::type>();
      auto* y = args.y.ptr<Out>();
      const float factor = args.factor ? *args.factor.ptr<float>() : 1.0f;
      parallel_for(args.x.numel(), kElementsPerThread, [&](int64_t first, int64_t last) {
        for (int64_t i = first; i < last; ++i) y[i] = Out(factor * static_cast<float>(x[i]));
      });
    });
  });
}

}  // namespace te::cpu
