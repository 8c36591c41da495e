// The meaning of dequantize: see ops/dequantize.h.
#include "ops/dequantize.h"

#include "core/parallel.h"

namespace te::cpu {

void dequantize(const DequantizeArgs& args) {
  constexpr int64_t kElementsPerThread = 1 << 17;
  const float scale_inverse = args.scales.ptr<float>()[0];
  const uint8_t* codes = args.q.ptr<uint8_t>();
  dispatch_fp8(args.dtype, "dequantize", [&](auto in) {
    using Fp8 = typename decltype(in)::type;
    dispatch_high_precision(args.x.dtype, "dequantize", [&](auto out) {
      using Out = typename decltype(out)::type;
      Out* x = args.x.ptr<Out>();
      parallel_for(args.q.numel(), kElementsPerThread, [&](int64_t first, int64_t last) {
        for (int64_t i = first; i < last; ++i) x[i] = Out(Fp8::decode(codes[i]) * scale_inverse);
      });
    });
  });
}

}  // namespace te::cpu
