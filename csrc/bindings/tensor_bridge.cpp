#include "bindings/tensor_bridge.h"

#include <algorithm>
#include <unordered_map>

#include "bindings/dlpack_abi.h"

namespace te::bridge {
namespace {

constexpr const char* kOp = "tensor";

const py::object& tensor_type() {
  static const auto* type = new py::object(py::module_::import("torch").attr("Tensor"));
  return *type;
}

const dlpack::ExchangeApi* api_of(PyTypeObject* type) {
  py::object capsule = py::reinterpret_steal<py::object>(
      PyObject_GetAttrString(reinterpret_cast<PyObject*>(type), dlpack::kAttribute));
  if (!capsule) {
    PyErr_Clear();
    return nullptr;
  }
  if (!PyCapsule_IsValid(capsule.ptr(), dlpack::kCapsuleName)) return nullptr;
  auto* header = static_cast<dlpack::ExchangeHeader*>(
      PyCapsule_GetPointer(capsule.ptr(), dlpack::kCapsuleName));
  while (header != nullptr && header->version.major != 1) header = header->previous;
  auto* api = reinterpret_cast<const dlpack::ExchangeApi*>(header);
  return api != nullptr && api->view != nullptr ? api : nullptr;
}

// The exchange API of a type of tensors, from a cache. The GIL guards the cache. An entry holds a
// reference to its type, so no other type can get the same address.
const dlpack::ExchangeApi* cached_api_of(PyTypeObject* type) {
  static auto* cache = new std::unordered_map<PyTypeObject*, const dlpack::ExchangeApi*>;
  static PyTypeObject* last_type = nullptr;
  static const dlpack::ExchangeApi* last_api = nullptr;
  if (type == last_type) return last_api;
  auto found = cache->find(type);
  if (found == cache->end()) {
    Py_INCREF(reinterpret_cast<PyObject*>(type));
    found = cache->emplace(type, api_of(type)).first;
  }
  last_type = type;
  last_api = found->second;
  return last_api;
}

DType dtype_from_dlpack(dlpack::DataType t) {
  if (t.lanes == 1) {
    switch (t.code) {
      case dlpack::kFloat:
        if (t.bits == 32) return DType::Float32;
        if (t.bits == 16) return DType::Float16;
        if (t.bits == 64) return DType::Float64;
        break;
      case dlpack::kBFloat:
        if (t.bits == 16) return DType::BFloat16;
        break;
      case dlpack::kUInt:
        if (t.bits == 8) return DType::UInt8;
        break;
      case dlpack::kInt:
        if (t.bits == 16) return DType::Int16;
        if (t.bits == 32) return DType::Int32;
        if (t.bits == 64) return DType::Int64;
        break;
      case dlpack::kBool: return DType::Bool;
      case dlpack::kFloat8E4M3: return DType::Float8E4M3;
      case dlpack::kFloat8E5M2: return DType::Float8E5M2;
      default: break;
    }
  }
  fail(Kind::Type, kOp,
       "expected float32, float16, bfloat16, float64, float8_e4m3fn, float8_e5m2, uint8, int16, "
       "int32, int64 or bool, got DLPack type code ",
       int{t.code}, " with ", int{t.bits}, " bits");
}

Device device_from_dlpack(dlpack::Device d) {
  constexpr int32_t kPinnedHost = 3;
  if (d.type == static_cast<int32_t>(DeviceType::CPU) || d.type == kPinnedHost) return {};
  if (d.type == static_cast<int32_t>(DeviceType::CUDA)) return {DeviceType::CUDA, d.index};
  fail(Kind::Value, kOp, "expected a tensor on cpu or cuda, got DLPack device type ", d.type);
}

void set_rank(TensorView& out, int64_t rank) {
  require(rank <= kMaxRank, Kind::Value, kOp, "expected at most ", kMaxRank, " dimensions, got ",
          rank);
  out.rank = static_cast<int32_t>(rank);
}

// Refuses tensors with elements but without storage (FakeTensor, wrapper subclasses such as
// quantized tensors). The exchange API reports success for them, with a null pointer that an op
// would read.
void guard(const TensorView& view, py::handle object) {
  require(
      view.data != nullptr || view.numel() == 0, Kind::Type, kOp,
      "expected a tensor with storage, got a ", Py_TYPE(object.ptr())->tp_name, " of shape ",
      ShapeOf{view},
      " without data (a fake, meta or wrapper tensor; dequantize() makes a quantized one plain, "
      "torch.distributed._functional_collectives.wait_tensor() one of a collective)");
}

void view_through_api(const dlpack::ExchangeApi& api, py::handle object, TensorView& out) {
  dlpack::Tensor t{};
  if (api.view(object.ptr(), &t) != 0) {
    PyErr_Clear();
    fail(Kind::Type, kOp, "expected a dense tensor on cpu or cuda, got a ",
         Py_TYPE(object.ptr())->tp_name, " that has no memory to point at (meta, sparse, ...)");
  }
  set_rank(out, t.rank);
  out.dtype = dtype_from_dlpack(t.dtype);
  out.device = device_from_dlpack(t.device);
  std::copy_n(t.sizes, t.rank, out.sizes.begin());
  int64_t expected = 1;
  for (int i = t.rank - 1; i >= 0; --i) {
    const auto axis = static_cast<size_t>(i);
    out.strides[axis] = t.strides != nullptr ? t.strides[axis] : expected;
    expected *= t.sizes[axis];
  }
  out.data = t.data != nullptr ? static_cast<char*>(t.data) + t.byte_offset : nullptr;
}

}  // namespace

bool view_of(py::handle object, TensorView& out) {
  const dlpack::ExchangeApi* api = cached_api_of(Py_TYPE(object.ptr()));
  if (api == nullptr) {  // quantized tensors hide the API of their base class
    if (!py::isinstance(object, tensor_type())) return false;
    api = cached_api_of(reinterpret_cast<PyTypeObject*>(tensor_type().ptr()));
  }
  view_through_api(*api, object, out);
  guard(out, object);
  return true;
}

Stream current_stream(Device device) {
  if (device.type == DeviceType::CPU) return {};
  const dlpack::ExchangeApi* api =
      cached_api_of(reinterpret_cast<PyTypeObject*>(tensor_type().ptr()));
  Stream stream;
  if (api->current_stream(static_cast<int32_t>(device.type), device.index, &stream.handle) != 0)
    throw py::error_already_set();
  return stream;
}

namespace {

// Describes a tensor as C++ sees it, for tests that compare this with torch's own description.
py::dict describe(const TensorView& t) {
  py::tuple sizes(t.rank), strides(t.rank);
  for (int i = 0; i < t.rank; ++i) {
    sizes[static_cast<size_t>(i)] = t.size(i);
    strides[static_cast<size_t>(i)] = t.stride(i);
  }
  py::dict result;
  result["data"] = reinterpret_cast<uintptr_t>(t.data);
  result["dtype"] = name_of(t.dtype);
  result["device"] = concat(t.device);
  result["sizes"] = sizes;
  result["strides"] = strides;
  result["contiguous"] = t.is_contiguous();
  result["stream"] = reinterpret_cast<uintptr_t>(current_stream(t.device).handle);
  return result;
}

}  // namespace

void bind_tensor_bridge(py::module_& m) {
  m.def("describe", &describe, py::arg("tensor").none(false));
  m.def(
      "_nop", [](const TensorView&, const TensorView&, const TensorView&) {}, py::arg("a"),
      py::arg("b"), py::arg("c"));
}

}  // namespace te::bridge
