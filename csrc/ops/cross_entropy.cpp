#include "ops/cross_entropy.h"

#include "ops/check.h"
#include "ops/dispatch.h"

namespace te {
namespace {

void rows_of_classes(const TensorView& logits, const TensorView& labels, std::string_view op) {
  check::input(logits, op, "logits");
  require(logits.rank == 2 && logits.size(1) > 0, Kind::Value, op,
          "expected logits of shape (rows, classes), got ", ShapeOf{logits});
  check::vector(labels, logits.size(0), DType::Int32, logits, op, "labels");
}

// Column-wise codes [classes, rows], whose rows may lie apart.
void column_codes(const TensorView& t, const TensorView& logits, std::string_view op) {
  const int64_t rows = logits.size(0), classes = logits.size(1);
  require(size_of(t.dtype) == 1 && t.rank == 2 && t.size(0) == classes && t.size(1) == rows &&
              (rows == 1 || t.stride(1) == 1) && t.stride(0) >= rows,
          Kind::Value, op, "expected ", classes, " x ", rows,
          " one-byte codes with contiguous rows for the column-wise output, got ", t);
  check::same_device(t, logits, op, "the column-wise output");
}

}  // namespace

void cross_entropy_forward(const CrossEntropyForwardArgs& args, Stream stream) {
  constexpr const char* kOp = "cross_entropy_forward";
  rows_of_classes(args.logits, args.labels, kOp);
  check::contiguous(args.sums, kOp, "sums");
  check::dtype(args.sums, DType::Float32, kOp, "sums");
  check::same_device(args.sums, args.logits, kOp, "sums");
  require(args.sums.rank == 2 && args.sums.size(0) == 4 && args.sums.size(1) == args.logits.size(0),
          Kind::Value, kOp, "expected sums of shape (4, ", args.logits.size(0), "), got ",
          ShapeOf{args.sums});
  if (args.logits.numel() == 0) return;
  on_device<cpu::cross_entropy_forward, cuda::cross_entropy_forward>(args.logits, args, stream);
}

void cross_entropy_backward(const CrossEntropyBackwardArgs& args, Stream stream) {
  constexpr const char* kOp = "cross_entropy_backward";
  rows_of_classes(args.logits, args.labels, kOp);
  check::vector(args.log_sums, args.logits.size(0), DType::Float32, args.logits, kOp, "log_sums");
  if (args.factors)
    check::vector(args.factors, args.logits.size(0), DType::Float32, args.logits, kOp, "factors");
  require(args.dx || args.codes, Kind::Value, kOp, "expected dx or codes, got neither");
  if (args.dx) check::alike(args.dx, args.logits.dtype, args.logits, kOp, "dx");
  if (args.codes) {
    QuantizedView others = args.codes;
    others.columnwise = {};
    check::quantized(others, args.logits.rows(), args.logits.cols(), args.logits, kOp);
    if (args.codes.columnwise) column_codes(args.codes.columnwise, args.logits, kOp);
    require(!args.codes.amax, Kind::Value, kOp, "expected codes without an amax");
  }
  if (args.logits.numel() == 0) return;
  on_device<cpu::cross_entropy_backward, cuda::cross_entropy_backward>(args.logits, args, stream);
}

}  // namespace te
