#include "ops/copy.h"

#include <cstring>

#include "ops/check.h"
#include "ops/dispatch.h"

namespace te {

void copy(const TensorView& x, const TensorView& out, Stream stream) {
  check::contiguous(x, "copy", "x");
  check::dtype(out, x.dtype, "copy", "out");
  check::same_device(out, x, "copy", "out");
  require(out.rank == x.rank && out.sizes == x.sizes, Kind::Value, "copy",
          "expected out with the sizes of x, got ", out, " for ", x);
  if (x.numel() == 0) return;
  const Rows rows = rows_of(out, "copy", "out");
  const auto on_cpu = [&] {
    for (int64_t row = 0; row < rows.count; ++row)
      std::memcpy(rows.data + row * rows.pitch, x.ptr<char>() + row * rows.bytes,
                  static_cast<size_t>(rows.bytes));
  };
  on_device(x, on_cpu, [&] { cuda::copy(x, rows, stream); });
}

}  // namespace te
