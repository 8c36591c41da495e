#include "ops/moments.h"

#include "ops/check.h"
#include "ops/dispatch.h"

namespace te {

void moments(const MomentsArgs& args, Stream stream) {
  constexpr const char* kOp = "moments";
  check::input(args.x, kOp, "x");
  check::moments(args.out, kMomentsFields, args.x, kOp);
  on_device<cpu::moments, cuda::moments>(args.x, args, stream);
}

void cast_moments(const CastMomentsArgs& args, Stream stream) {
  constexpr const char* kOp = "cast_moments";
  check::input(args.x, kOp, "x");
  require(is_fp8(args.format), Kind::Type, kOp, "expected an FP8 format, got ", args.format);
  check::same_shape(args.codes, args.x, kOp, "codes");
  require(size_of(args.codes.dtype) == 1, Kind::Type, kOp, "expected one-byte codes, got ",
          args.codes.dtype);
  check::vector(args.scales, 2, DType::Float32, args.x, kOp, "scales");
  check::moments(args.out, kCastMomentsFields, args.x, kOp);
  on_device<cpu::cast_moments, cuda::cast_moments>(args.x, args, stream);
}

void merge_rows(const MergeRowsArgs& args, Stream stream) {
  constexpr const char* kOp = "merge_rows";
  check::dtype(args.into, DType::Float64, kOp, "into");
  check::contiguous(args.into, kOp, "into");
  require(args.into.rank == 2 && args.into.size(1) == kRowFields, Kind::Value, kOp,
          "expected shape (slots, ", kRowFields, ") for into, got ", ShapeOf{args.into});
  check::dtype(args.rows, DType::Float64, kOp, "rows");
  check::contiguous(args.rows, kOp, "rows");
  check::same_device(args.rows, args.into, kOp, "rows");
  const int64_t slots = args.into.size(0);
  require(args.rows.rank == 3 && args.rows.size(1) == slots && args.rows.size(2) == kRowFields,
          Kind::Value, kOp, "expected shape (n, ", slots, ", ", kRowFields, ") for rows, got ",
          ShapeOf{args.rows});
  check::vector(args.kinds, slots, DType::Int64, args.into, kOp, "kinds");
  if (args.active) check::vector(args.active, 1, DType::Int32, args.into, kOp, "active");
  on_device<cpu::merge_rows, cuda::merge_rows>(args.into, args, stream);
}

}  // namespace te
