// The meaning of quantize: see ops/quantize.h. Rows are shared out among threads; the bias gradient
// is summed per column in row order, so its result does not depend on the number of threads.
#include "ops/quantize.h"

#include <algorithm>
#include <cmath>

#include "core/scaling.h"
#include "cpu/column_sum.h"
#include "cpu/parallel_max.h"

namespace te::cpu {
namespace {

constexpr int64_t kElementsPerThread = 1 << 17;

float scale_used(const QuantizedView& out) {
  if (!out.scale) return out.scales.ptr<float>()[1];
  const float scale = out.scale.ptr<float>()[0];
  out.scales.ptr<float>()[0] = divide(1.0f, scale);
  out.scales.ptr<float>()[1] = scale;
  return scale;
}

template <class In, class Fp8>
float encode_rows(const QuantizeArgs& args, float scale, int64_t first, int64_t last) {
  const int64_t cols = args.x.cols(), rows = args.x.rows();
  const In* x = args.x.ptr<In>();
  uint8_t* rowwise = args.out.rowwise.ptr<uint8_t>();
  uint8_t* columnwise = args.out.columnwise.ptr<uint8_t>();
  float amax = 0.0f;
  for (int64_t i = first; i < last; ++i) {
    for (int64_t j = 0; j < cols; ++j) {
      const float value = static_cast<float>(x[i * cols + j]);
      const uint8_t code = Fp8::encode(value * scale);
      if (rowwise) rowwise[i * cols + j] = code;
      if (columnwise) columnwise[j * rows + i] = code;
      amax = max_ignoring_nan(amax, std::fabs(value));
    }
  }
  return amax;
}

}  // namespace

void quantize(const QuantizeArgs& args) {
  const int64_t rows = args.x.rows(), cols = args.x.cols();
  const float scale = scale_used(args.out);
  dispatch_high_precision(args.x.dtype, "quantize", [&](auto in) {
    using In = typename decltype(in)::type;
    dispatch_fp8(args.out.dtype, "quantize", [&](auto out) {
      using Fp8 = typename decltype(out)::type;
      const int64_t grain = kElementsPerThread / std::max<int64_t>(1, cols) + 1;
      const float amax = parallel_max(rows, grain, [&](int64_t first, int64_t last) {
        return encode_rows<In, Fp8>(args, scale, first, last);
      });
      if (args.out.amax) {
        float* stored = args.out.amax.ptr<float>();
        *stored = max_ignoring_nan(*stored, amax);
      }
    });
    if (args.dbias) {
      const In* x = args.x.ptr<In>();
      column_sum(args.dbias, rows, cols,
                 [&](int64_t i, int64_t j) { return static_cast<float>(x[i * cols + j]); });
    }
  });
  if (args.moments) cpu::moments({args.x, args.moments});
}

}  // namespace te::cpu
