#include "bindings/workspace.h"

#include <map>
#include <tuple>
#include <vector>

#include "bindings/tensor_bridge.h"
#include "ops/amax.h"
#include "ops/column_sum.h"
#include "ops/moments.h"

namespace te::bindings {
namespace {

namespace py = pybind11;

enum class Purpose { Gemm, ColumnSum, Moments, Amax, Attention, Recording };

constexpr int64_t kGemmBytes = 32 * 1024 * 1024;  // what cuBLASLt's Hopper algorithms expect

struct Buffer {
  py::object tensor;
  TensorView view;
  bool leased = false;  // a RecordingScratch uses it
};

// The GIL guards this table. It is never destroyed, because Python ends before static destructors.
struct Table {
  py::object zeros;  // (bytes, CUDA device index) -> uint8 tensor of no memory pool, already zero
  py::object empty;  // (bytes, CUDA device index) -> uint8 tensor of the pool of this thread
  std::map<std::tuple<Purpose, int32_t, void*>, Buffer> buffers;
  std::vector<Buffer> outgrown;
};

Table& table() {
  static auto* table = new Table;
  return *table;
}

// The buffer of a purpose, device and stream, replaced by a larger one if it is too small.
Buffer& grown(Purpose purpose, Device device, Stream stream, int64_t bytes) {
  Buffer& found = table().buffers[{purpose, device.index, stream.handle}];
  if (!found.view || found.view.bytes() < bytes) {
    py::object tensor = table().zeros(bytes, device.index);
    if (found.view) table().outgrown.push_back(found);
    found.view = py::cast<TensorView>(tensor);
    found.tensor = std::move(tensor);
  }
  return found;
}

TensorView buffer(Purpose purpose, Device device, Stream stream, int64_t bytes) {
  return grown(purpose, device, stream, bytes).view;
}

}  // namespace

TensorView gemm_workspace(Device device, Stream stream) {
  if (device.type == DeviceType::CPU) return {};
  return buffer(Purpose::Gemm, device, stream, kGemmBytes);
}

TensorView column_sum_workspace(Device device, Stream stream, int64_t rows, int64_t cols) {
  if (device.type == DeviceType::CPU) return {};
  return buffer(Purpose::ColumnSum, device, stream, column_sum_workspace_bytes(rows, cols));
}

TensorView moments_workspace(Device device, Stream stream, int64_t rows, int64_t cols) {
  if (device.type == DeviceType::CPU) return {};
  return buffer(Purpose::Moments, device, stream, tile_moments_workspace_bytes(rows, cols));
}

MomentsSink moments_sink(const TensorView& row, const TensorView& active, const TensorView& x,
                         Stream stream) {
  if (!row) return {};
  return {row, active, moments_workspace(x.device, stream, x.rows(), x.cols())};
}

TensorView attention_workspace(Device device, Stream stream, int64_t bytes) {
  return buffer(Purpose::Attention, device, stream, bytes);
}

RecordingScratch::RecordingScratch(Device device, int64_t bytes) {
  if (device.type == DeviceType::CPU || bytes == 0 || bytes > kLargestScratch) return;
  Buffer& found = grown(Purpose::Recording, device, bridge::current_stream(device), bytes);
  if (found.leased) return;
  view_ = found.view;
  leased_ = &found.leased;
  *leased_ = true;
}

RecordingScratch::~RecordingScratch() {
  if (leased_ != nullptr) *leased_ = false;
}

py::object large_scratch(Device device, int64_t bytes) {
  return table().empty(bytes, device.index);
}

TensorView amax_scratch(Device device, Stream stream, size_t number) {
  constexpr int64_t kCount = 2;
  static int32_t on_cpu[kCount] = {};  // checked like any other scratch, and never written
  TensorView view{.data = on_cpu, .dtype = DType::Int32, .device = device, .rank = 1};
  view.sizes[0] = kCount;
  view.strides[0] = 1;
  if (device.type != DeviceType::CPU) {
    const TensorView all = buffer(Purpose::Amax, device, stream, kAmaxesAtOnce * kCount * 4);
    view.data = all.ptr<int32_t>() + number % kAmaxesAtOnce * kCount;
  }
  return view;
}

void bind_workspace(py::module_& m) {
  m.def(
      "set_workspace_allocators",
      [](const py::object& zeros, const py::object& empty) {
        table().zeros = zeros;
        table().empty = empty;
      },
      py::arg("zeros"), py::arg("empty"));
}

}  // namespace te::bindings
