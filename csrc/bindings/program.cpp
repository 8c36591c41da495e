#include "bindings/program.h"

#include <pybind11/stl.h>

#include "bindings/workspace.h"
#include "core/error.h"

namespace te::bindings {
namespace {

namespace py = pybind11;

constexpr const char* kOp = "program";

py::object& gemm_definition() {
  static auto* kept = new py::object;
  return *kept;
}

bool same(const TensorView& a, const TensorView& b) {
  return a.rank == b.rank && a.dtype == b.dtype && a.device == b.device && a.sizes == b.sizes &&
         a.is_contiguous() == b.is_contiguous();
}

using Address = std::tuple<uintptr_t, int64_t, int, int64_t>;  // address, bytes, slot, offset
using Recipe = std::optional<py::tuple>;  // what allocators are called with; none: no tensor

// Slots are, in this order: the inputs, scratch memory, and what the other recipes make. A tensor
// is the first allocator's if that made it on the device of the inputs, else the next one's.
class Program {
 public:
  Program(const Recorder& recorder, const std::vector<TensorView>& inputs,
          const std::vector<Address>& addresses, const std::vector<Recipe>& recipes,
          const std::vector<py::object>& allocators, Device device)
      : steps_(recorder.steps),
        inputs_(inputs),
        recipes_(recipes),
        allocators_(allocators),
        device_(device) {
    Regions regions;
    for (const auto& [address, bytes, slot, offset] : addresses)
      regions[address] = {bytes, {slot, offset}};
    for (const auto& step : steps_) step->place(regions, device);
    const Recipe& scratch = recipes_.at(0);
    if (scratch) scratch_bytes_ = py::cast<int64_t>(py::tuple((*scratch)[0])[0]);
  }

  // The slots, those of the inputs included; None, with nothing done, where an input does not look
  // like that of the recording.
  py::object run(const py::tuple& inputs) const {
    const size_t count = inputs_.size();
    if (inputs.size() != count) return py::none();
    Memory memory(count + recipes_.size());
    for (size_t i = 0; i < count; ++i) {
      const py::object tensor = inputs[i];
      TensorView view;
      if (!tensor.is_none() && !bridge::view_of(tensor, view)) return py::none();
      if (!same(view, inputs_[i])) return py::none();
      memory.put(i, tensor, view);
    }
    for (size_t i = 0; i < recipes_.size(); ++i) {
      if (const TensorView own = i == 0 ? own_scratch() : TensorView{})
        memory.put(count, py::none(), own);
      else
        make(recipes_[i], memory, count + i);
    }
    for (const auto& step : steps_) step->run(memory.bases);
    return memory.tensors;
  }

 private:
  struct Memory {
    explicit Memory(size_t slots) : tensors(slots), bases(slots) {}

    void put(size_t slot, const py::object& tensor, const TensorView& view) {
      PyList_SET_ITEM(tensors.ptr(), static_cast<py::ssize_t>(slot), tensor.inc_ref().ptr());
      bases[slot] = static_cast<char*>(view.data);
    }

    py::list tensors;
    Bases bases;
  };

  void make(const Recipe& recipe, Memory& memory, size_t slot) const {
    if (!recipe) return memory.put(slot, py::none(), {});
    for (const py::object& allocate : allocators_) {
      PyObject* made = PyObject_CallObject(allocate.ptr(), recipe->ptr());
      if (made == nullptr) throw py::error_already_set();
      const auto tensor = py::reinterpret_steal<py::object>(made);
      const auto view = py::cast<TensorView>(tensor);
      if (view.device == device_) return memory.put(slot, tensor, view);
    }
    fail(Kind::Internal, kOp, "expected an allocator of ", device_, ", got none");
  }

  TensorView own_scratch() const {
    if (scratch_bytes_ == 0 || scratch_bytes_ > kLargestScratch) return {};
    return stream_scratch(device_, bridge::current_stream(device_), scratch_bytes_);
  }

  std::vector<std::shared_ptr<Step>> steps_;
  std::vector<TensorView> inputs_;
  std::vector<Recipe> recipes_;
  std::vector<py::object> allocators_;
  Device device_;
  int64_t scratch_bytes_ = 0;
};

Program make_program(const Recorder& recorder, const std::vector<TensorView>& inputs,
                     const std::vector<Address>& addresses, const std::vector<Recipe>& recipes,
                     const std::vector<py::object>& allocators) {
  for (const TensorView& input : inputs)
    if (input) return {recorder, inputs, addresses, recipes, allocators, input.device};
  fail(Kind::Internal, kOp, "expected an input, got none");
}

}  // namespace

std::optional<Place> find(const Regions& regions, const TensorView& view) {
  const auto address = reinterpret_cast<uintptr_t>(view.data);
  auto next = regions.upper_bound(address);
  if (next == regions.begin()) return std::nullopt;
  const auto& [start, region] = *--next;
  const auto distance = static_cast<int64_t>(address - start);
  if (distance >= region.bytes) return std::nullopt;
  return Place{region.place.slot, region.place.offset + distance};
}

Recorder*& Recorder::active() {
  thread_local Recorder* recorder = nullptr;
  return recorder;
}

py::object describe_memory(const TensorView& view) {
  if (!view) return py::none();
  py::tuple sizes(view.rank);
  for (int i = 0; i < view.rank; ++i) sizes[static_cast<size_t>(i)] = view.size(i);
  const int device = view.device.type == DeviceType::CPU ? -1 : view.device.index;
  return py::make_tuple(reinterpret_cast<uintptr_t>(view.data), static_cast<int>(view.dtype), sizes,
                        device);
}

void run_definition(const std::vector<py::object>& arguments) {
  py::tuple packed(arguments.size());
  for (size_t i = 0; i < arguments.size(); ++i) packed[i] = arguments[i];
  gemm_definition()(*packed);
}

void bind_program(py::module_& m) {
  using py::arg;
  py::class_<Recorder>(m, "Recorder")
      .def(py::init())
      .def("start", [](Recorder& self) { Recorder::active() = &self; })
      .def("stop", [](Recorder&) { Recorder::active() = nullptr; })
      .def("addresses", [](const Recorder& self) {
        std::vector<std::vector<uintptr_t>> found;
        for (const auto& step : self.steps) found.push_back(step->addresses());
        return found;
      });
  py::class_<Program>(m, "Program")
      .def(py::init(&make_program), arg("recorder"), arg("inputs"), arg("addresses"),
           arg("recipes"), arg("allocators"))
      .def("run", &Program::run);
  m.def(
      "set_gemm_definition", [](const py::object& definition) { gemm_definition() = definition; },
      arg("definition"));
}

}  // namespace te::bindings
