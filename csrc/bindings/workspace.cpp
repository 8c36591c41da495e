#include "bindings/workspace.h"

#include <bit>
#include <map>
#include <tuple>
#include <vector>

#include "bindings/tensor_bridge.h"
#include "ops/amax.h"
#include "ops/moments.h"

namespace te::bindings {
namespace {

namespace py = pybind11;

enum class Purpose { Gemm, ColumnSum, SumsAtEnd, Moments, Amax, Attention, Recording };

constexpr int64_t kGemmBytes = 32 * 1024 * 1024;  // what cuBLASLt's Hopper algorithms expect

struct Buffer {
  py::object tensor;
  TensorView view;
  bool leased = false;  // a running recording uses it
  bool counts_tiles = false;
};

// The GIL guards this table. It is never destroyed, because Python ends before static destructors.
struct Table {
  py::object zeros;  // (bytes, CUDA device index) -> uint8 tensor of no memory pool, already zero
  py::object empty;  // (bytes, CUDA device index) -> uint8 tensor of the pool of this thread
  py::object counts_tiles;  // () -> whether GEMMs count tiles
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

std::pair<TensorView, bool> gemm_workspace(Device device, Stream stream) {
  if (device.type == DeviceType::CPU) return {};
  Buffer& found = table().buffers[{Purpose::Gemm, device.index, stream.handle}];
  if (!found.view) {
    grown(Purpose::Gemm, device, stream, kGemmBytes);
    found.counts_tiles = py::cast<bool>(table().counts_tiles());
  }
  return {found.view, found.counts_tiles};
}

ColumnSumWorkspace column_sum_workspace(const SumsOutput& output, const TensorView& x,
                                        Stream stream, int64_t count) {
  if (!output.to || x.device.type == DeviceType::CPU) return {};
  const int64_t rows = x.rows(), cols = count * x.cols();
  if (output.later != nullptr) return output.later->workspace(rows, cols);
  return {buffer(Purpose::ColumnSum, x.device, stream, column_sum_workspace_bytes(rows, cols))};
}

SumsAtEnd::SumsAtEnd(Device device) : device_(device) {
  if (device.type == DeviceType::CPU) return;
  stream_ = bridge::current_stream(device);
  Buffer& found = table().buffers[{Purpose::SumsAtEnd, device.index, stream_.handle}];
  if (found.leased) return;
  leased_ = &found.leased;
  *leased_ = true;
}

SumsAtEnd::~SumsAtEnd() {
  if (leased_ != nullptr) *leased_ = false;
}

ColumnSumWorkspace SumsAtEnd::workspace(int64_t rows, int64_t cols) {
  constexpr uintptr_t kAlignment = 256;
  if (sums_.size() > seen_) {  // the op before has left fewer parts than it had room for
    const ColumnSum& last = sums_.back();
    seen_ = sums_.size();
    const auto end = reinterpret_cast<uintptr_t>(last.parts + last.count * last.pitch);
    free_ = reinterpret_cast<char*>((end + kAlignment - 1) / kAlignment * kAlignment);
  }
  const int64_t bytes = column_sum_workspace_bytes(rows, cols);
  if (end_ - free_ < bytes) {
    const auto needed = static_cast<uint64_t>(free_ - begin_ + bytes);
    const TensorView all =
        buffer(Purpose::SumsAtEnd, device_, stream_, static_cast<int64_t>(std::bit_ceil(needed)));
    begin_ = free_ = all.ptr<char>();
    end_ = begin_ + all.bytes();
  }
  TensorView memory{.data = free_, .dtype = DType::UInt8, .device = device_, .rank = 1};
  memory.sizes[0] = end_ - free_;
  memory.strides[0] = 1;
  return {memory, &sums_};
}

void SumsAtEnd::add_up() const {
  if (!sums_.empty()) cuda::add_column_parts(sums_, stream_);
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
      "set_workspace_functions",
      [](const py::object& zeros, const py::object& empty, const py::object& counts_tiles) {
        table().zeros = zeros;
        table().empty = empty;
        table().counts_tiles = counts_tiles;
      },
      py::arg("zeros"), py::arg("empty"), py::arg("counts_tiles"));
}

}  // namespace te::bindings
