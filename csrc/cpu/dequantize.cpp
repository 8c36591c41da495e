// The CPU backend of dequantize, which defines its results: see ops/dequantize.h.
#include "ops/dequantize.h"

#include <algorithm>

#include "core/parallel.h"

namespace te::cpu {
namespace {

constexpr int64_t kElementsPerThread = 1 << 17;

template <class Fp8, class Out>
void dequantize_blocks(const DequantizeArgs& args) {
  const int64_t cols = args.q.cols();
  const ScaleGrid grid = scale_grid(args.blocks, args.q.rows(), cols);
  const float* inverses = args.scales.ptr<float>();
  const int64_t grain = kElementsPerThread / std::max<int64_t>(1, cols) + 1;
  parallel_for(args.q.rows(), grain, [&](int64_t first, int64_t last) {
    for (int64_t i = first; i < last; ++i) {
      const uint8_t* codes = args.q.ptr<uint8_t>() + i * cols;
      Out* x = args.x.ptr<Out>() + i * cols;
      for (int64_t block = 0; block < cols; block += kScaleBlock) {
        const float inverse = inverses[grid.at(i, block)];
        for (int64_t j = block; j < std::min(cols, block + kScaleBlock); ++j)
          x[j] = Out(Fp8::decode(codes[j]) * inverse);
      }
    }
  });
}

template <class Fp8, class Out>
void dequantize_whole(const DequantizeArgs& args) {
  const float scale_inverse = args.scales.ptr<float>()[0];
  const uint8_t* codes = args.q.ptr<uint8_t>();
  Out* x = args.x.ptr<Out>();
  parallel_for(args.q.numel(), kElementsPerThread, [&](int64_t first, int64_t last) {
    for (int64_t i = first; i < last; ++i) x[i] = Out(Fp8::decode(codes[i]) * scale_inverse);
  });
}

}  // namespace

void dequantize(const DequantizeArgs& args) {
  dispatch_fp8(args.dtype, "dequantize", [&](auto in) {
    dispatch_high_precision(args.x.dtype, "dequantize", [&](auto out) {
      using Fp8 = typename decltype(in)::type;
      using Out = typename decltype(out)::type;
      if (args.blocks == ScaleBlocks::Whole) return dequantize_whole<Fp8, Out>(args);
      dequantize_blocks<Fp8, Out>(args);
    });
  });
}

}  // namespace te::cpu
