#include "ops/delayed_scaling.h"

#include "core/scaling.h"
#include "ops/check.h"
#include "ops/dispatch.h"

namespace te {
namespace {

void check_table(const TensorView& table, const char* op) {
  check::contiguous(table, op, "the table");
  check::dtype(table, DType::Int64, op, "the table");
  require(table.rank == 2 && table.size(1) == 6, Kind::Value, op,
          "expected shape (states, 6) for the table, got ", ShapeOf{table});
}

// Checks a vector with one value per column; may be absent. The number of columns is known only on
// the CPU, where the table can be read.
void check_columns(const TensorView& t, const TensorView& table, const char* op, const char* name) {
  if (!t) return;
  check::vector(t, t.numel(), DType::Float32, table, op, name);
  if (table.device.type != DeviceType::CPU) return;
  int64_t columns = 0;
  for (int64_t s = 0; s < table.size(0); ++s) columns += table.ptr<ScalingEntry>()[s].count;
  check::vector(t, columns, DType::Float32, op, name);
}

}  // namespace

void delayed_scaling_update(const DelayedScalingArgs& args, Stream stream) {
  constexpr const char* kOp = "delayed_scaling_update";
  check_table(args.table, kOp);
  check_columns(args.reduced, args.table, kOp, "the reduced amax");
  check_columns(args.amax, args.table, kOp, "the amax");
  check_columns(args.scale, args.table, kOp, "the scale");
  require(args.fp8_max > 0.0f && is_finite(args.fp8_max), Kind::Value, kOp,
          "expected a positive finite fp8_max, got ", args.fp8_max);
  constexpr int32_t kMarginLimit = 126;  // 2^margin and its inverse are normal floats
  require(args.margin >= -kMarginLimit && args.margin <= kMarginLimit, Kind::Value, kOp,
          "expected a margin between -126 and 126, got ", args.margin);
  on_device<cpu::delayed_scaling_update, cuda::delayed_scaling_update>(args.table, args, stream);
}

void gather_amax(const GatherAmaxArgs& args, Stream stream) {
  constexpr const char* kOp = "gather_amax";
  check_table(args.table, kOp);
  check_columns(args.reduced, args.table, kOp, "the reduced amax");
  check::defined(args.out, kOp, "the output");
  check_columns(args.out, args.table, kOp, "the output");
  on_device<cpu::gather_amax, cuda::gather_amax>(args.table, args, stream);
}

}  // namespace te
