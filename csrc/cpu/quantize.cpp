// The CPU backend of quantize, which defines its results: see ops/quantize.h. Threads share the
// rows. The bias gradient is summed per column in the order of rows, so its result does not depend
// on the number of threads.
#include "ops/quantize.h"

#include <algorithm>
#include <vector>

#include "cpu/column_sum.h"
#include "cpu/row_sink.h"

namespace te::cpu {
namespace {

constexpr int64_t kElementsPerThread = 1 << 17;

}  // namespace

void quantize(const QuantizeArgs& args) {
  const int64_t rows = args.x.rows(), cols = args.x.cols();
  const RowSink sink(rows, cols, {}, args.out, {});
  dispatch_high_precision(args.x.dtype, "quantize", [&](auto tag) {
    const auto* x = args.x.ptr<typename decltype(tag)::type>();
    const int64_t grain = kElementsPerThread / std::max<int64_t>(1, cols) + 1;
    sink.write_all(grain, [&](int64_t row, std::vector<float>& values) {
      for (size_t j = 0; j < values.size(); ++j)
        values[j] = static_cast<float>(x[row * cols + static_cast<int64_t>(j)]);
    });
  });
  if (args.dbias) column_sum(args.dbias, args.x);
  if (args.moments) cpu::moments({args.x, args.moments});
}

}  // namespace te::cpu
