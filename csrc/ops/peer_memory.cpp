#include "ops/peer_memory.h"

namespace te {
namespace {

constexpr const char* kOp = "peer_send";

// Axes from here on lie one behind the other in memory.
int first_of_row(const TensorView& x) {
  int64_t length = 1;
  int axis = x.rank;
  while (axis > 0 && (x.size(axis - 1) == 1 || x.stride(axis - 1) == length))
    length *= x.size(--axis);
  return axis;
}

// The distance of rows, in elements; the axes before `row` must count them evenly.
int64_t distance(const TensorView& x, int row) {
  int64_t pitch = 0, rows = 1;
  for (int axis = row - 1; axis >= 0; --axis) {
    if (x.size(axis) == 1) continue;
    if (pitch == 0) pitch = x.stride(axis);
    require(x.stride(axis) == pitch * rows, Kind::Value, kOp,
            "expected x with rows of one distance, got strides of several");
    rows *= x.size(axis);
  }
  return pitch;
}

}  // namespace

void peer_send(const PeerSendArgs& args, Stream stream) {
  const TensorView& x = args.x;
  require(x && x.device.type == DeviceType::CUDA, Kind::Value, kOp,
          "expected x on a CUDA device, got ", x.device);
  const int row = first_of_row(x);
  int64_t length = 1;
  for (int axis = row; axis < x.rank; ++axis) length *= x.size(axis);
  const int64_t pitch = row == 0 ? length : distance(x, row);
  require(pitch >= length, Kind::Value, kOp,
          "expected rows that do not overlap, got a distance of ", pitch, " for ", length,
          " elements");
  cuda::peer_send(args, length * size_of(x.dtype), pitch * size_of(x.dtype), stream);
}

void peer_receive(Device device, void* arrived, Stream stream) {
  cuda::peer_receive(device, arrived, stream);
}

void peer_release(Device device, void* free, Stream stream) {
  cuda::peer_release(device, free, stream);
}

}  // namespace te
