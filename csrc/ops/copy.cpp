#include "ops/copy.h"

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
  on_device(
      x, [&] { cpu::copy(from, to); }, [&] { cuda::copy(from, to, x.device, stream); });
}

void zero(const TensorView& out, Stream stream) {
  if (out.numel() == 0) return;
  const Rows rows = rows_of(out, "zero", "out");
  on_device(
      out, [&] { cpu::zero(rows); }, [&] { cuda::zero(rows, out.device, stream); });
}

}  // namespace te
