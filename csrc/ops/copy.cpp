#include "ops/copy.h"

#include <cstring>

#include "ops/check.h"
#include "ops/dispatch.h"

namespace te {

void copy(const TensorView& x, const TensorView& out, Stream stream) {
  check::dtype(out, x.dtype, "copy", "out");
  check::same_device(out, x, "copy", "out");
  require(out.rank == x.rank && out.sizes == x.sizes, Kind::Value, "copy",
          "expected out with the sizes of x, got ", out, " for ", x);
  if (x.numel() == 0) return;
  Rows from = rows_of(x, "copy", "x"), to = rows_of(out, "copy", "out");
  if (from.count == 1) from = without_gaps(to, from.data);
  if (to.count == 1) to = without_gaps(from, to.data);
  require(from.count == to.count, Kind::Value, "copy", "expected x or out to be contiguous, got ",
          from.count, " and ", to.count, " rows");
  const auto on_cpu = [&] {
    for (int64_t row = 0; row < to.count; ++row)
      std::memcpy(to.data + row * to.pitch, from.data + row * from.pitch,
                  static_cast<size_t>(to.bytes));
  };
  on_device(x, on_cpu, [&] { cuda::copy(from, to, x.device, stream); });
}

}  // namespace te
