#include "ops/rope.h"

#include "ops/check.h"
#include "ops/dispatch.h"

namespace te {
namespace {

constexpr const char* kOp = "rope";

void check_positions(const RopeArgs& args) {
  const TensorView& x = args.x;
  const int64_t batch =
      args.cu_seqlens ? args.cu_seqlens.numel() - 1 : x.size(args.batch_first ? 0 : 1);
  if (args.cu_seqlens) {
    require(args.cu_seqlens.numel() > 0, Kind::Value, kOp,
            "expected cu_seqlens of shape (batch + 1), got an empty one");
    check::vector(args.cu_seqlens, batch + 1, DType::Int32, x, kOp, "cu_seqlens");
  }
  if (args.starts) {
    check::vector(args.starts, batch, DType::Int32, x, kOp, "the start positions");
  } else if (!args.cu_seqlens) {
    const int64_t sequence = x.size(args.batch_first ? 1 : 0);
    require(sequence <= args.freqs.size(0), Kind::Value, kOp, "expected freqs for at least ",
            sequence, " positions, got ", args.freqs.size(0));
  }
}

}  // namespace

RopeShape::RopeShape(const RopeArgs& args) {
  const TensorView& x = args.x;
  const bool packed = static_cast<bool>(args.cu_seqlens);
  const int s = !packed && args.batch_first ? 1 : 0, b = packed ? -1 : 1 - s;
  sequence = x.size(s);
  batch = packed ? 1 : x.size(b);
  heads = x.size(-2);
  size = x.size(-1);
  rotary_dim = args.freqs.size(1);
  positions = args.freqs.size(0);
  x_sequence = x.stride(s);
  x_batch = packed ? 0 : x.stride(b);
  x_head = x.stride(-2);
  const int64_t token = heads * size;
  out_sequence = s == 0 ? batch * token : token;
  out_batch = s == 0 ? token : sequence * token;
}

void rope(const RopeArgs& args, Stream stream) {
  const TensorView& x = args.x;
  check::high_precision(x, kOp, "x");
  const int rank = args.cu_seqlens ? 3 : 4;
  require(x.rank == rank, Kind::Value, kOp, "expected x with ", rank, " axes, got ", x);
  require(x.size(-1) <= 1 || x.stride(-1) == 1, Kind::Value, kOp,
          "expected the elements of a head side by side, got a stride of ", x.stride(-1));
  check::contiguous(args.freqs, kOp, "freqs");
  check::dtype(args.freqs, DType::Float32, kOp, "freqs");
  check::same_device(args.freqs, x, kOp, "freqs");
  require(args.freqs.rank == 2 && args.freqs.size(1) % 2 == 0 && args.freqs.size(1) <= x.size(-1),
          Kind::Value, kOp, "expected freqs (positions, an even number of at most ",
          Elements{x.size(-1)}, "), got ", ShapeOf{args.freqs});
  require(args.period > 0 && args.period <= x.size(-2) && args.rotated >= 0 &&
              args.rotated <= args.period,
          Kind::Value, kOp, "expected a period of 1 to ", x.size(-2),
          " heads, of which 0 to all are rotated, got ", args.rotated, " of ", args.period);
  check_positions(args);
  check::alike(args.out, x.dtype, x, kOp, "out");
  if (x.numel() == 0) return;
  require(args.freqs.size(0) > 0, Kind::Value, kOp,
          "expected freqs for at least 1 position, got 0");
  on_device<cpu::rope, cuda::rope>(x, args, stream);
}

}  // namespace te
