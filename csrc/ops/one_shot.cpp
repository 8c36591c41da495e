#include "ops/one_shot.h"

#include <algorithm>

#include "ops/check.h"

namespace te {
namespace {

constexpr const char* kOp = "one_shot";
constexpr int64_t kAlignment = 512;

int ranks_of(const TensorView& group) {
  const int64_t ranks = group.numel() - kOneShotGroupFields;
  check::vector(group, group.numel(), DType::Int64, kOp, "group");
  require(group.device.type == DeviceType::CPU && ranks > 1 && ranks <= kOneShotMostRanks,
          Kind::Value, kOp, "expected a group of 2 to ", kOneShotMostRanks, " ranks, got ", ranks);
  return static_cast<int>(ranks);
}

OneShotGroup read_group(const TensorView& group, int ranks) {
  const auto* fields = group.ptr<int64_t>();
  OneShotGroup found{.rank = fields[0],
                     .timeout = fields[1],
                     .lock_file = fields[2],
                     .last_stream = fields[kOneShotLastStream],
                     .addresses = {}};
  std::copy_n(fields + kOneShotGroupFields, ranks, found.addresses);
  return found;
}

}  // namespace

void one_shot(const OneShotArgs& args, Stream stream) {
  const TensorView &x = args.x, &out = args.out;
  const int ranks = ranks_of(args.group);
  check::contiguous(x, kOp, "x");
  check::contiguous(out, kOp, "out");
  check::dtype(out, x.dtype, kOp, "out");
  check::same_device(out, x, kOp, "out");
  check::same_device(args.memory, x, kOp, "memory");
  if (args.combine != Combine::Concatenate) check::high_precision(x, kOp, "x");
  const int64_t part = x.bytes() / (args.scatters ? ranks : 1);
  const int64_t results = args.combine == Combine::Concatenate ? ranks : 1;
  require(out.bytes() == results * part && x.numel() % (args.scatters ? ranks : 1) == 0,
          Kind::Value, kOp, "expected out with ", results, " parts of x, got ", out, " for ", x);
  const int64_t slot = (args.memory.bytes() - one_shot_header(ranks)) / 2 / kAlignment * kAlignment;
  const int64_t room = slot / (ranks - 1) / kAlignment * kAlignment;
  require(room > 0, Kind::Value, kOp, "expected memory for ", ranks, " ranks, got ", args.memory);
  OneShotPiece piece{.group = read_group(args.group, ranks),
                     .ranks = ranks,
                     .dtype = x.dtype,
                     .combine = args.combine,
                     .x = x.ptr<char>(),
                     .out = out.ptr<char>(),
                     .bytes = 0,
                     .x_stride = args.scatters ? part : 0,
                     .out_stride = args.combine == Combine::Concatenate ? part : 0,
                     .slot_bytes = slot,
                     .room = room};
  for (int64_t begin = 0; begin < part; begin += room) {
    piece.bytes = std::min(room, part - begin);
    if (x.device.type == DeviceType::CPU)
      cpu::one_shot(piece);
    else
      cuda::one_shot(piece, x.device, args.group.ptr<int64_t>()[kOneShotLastStream], stream);
    piece.x += piece.bytes;
    piece.out += piece.bytes;
  }
}

}  // namespace te
