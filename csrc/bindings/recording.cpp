#include "bindings/recording.h"

#include <pybind11/stl.h>

#include <algorithm>

#include "bindings/workspace.h"
#include "core/error.h"

namespace te::bindings {
namespace {

namespace py = pybind11;

constexpr const char* kOp = "recording";

py::object& gemm_definition() {
  static auto* definition = new py::object;
  return *definition;
}

bool same(const TensorView& a, const TensorView& b) {
  return a.rank == b.rank && a.dtype == b.dtype && a.device == b.device && a.sizes == b.sizes &&
         a.is_contiguous() == b.is_contiguous() && (a.is_contiguous() || a.strides == b.strides);
}

// Stage by stage, Python copies tensors that attention cannot read because their address is not a
// multiple of 16. A recording has no such copy, so it takes only aligned inputs.
bool aligned(const TensorView& view) { return reinterpret_cast<uintptr_t>(view.data) % 16 == 0; }

// Sets `view` to that of a tensor. Returns false if there is none: fake and meta tensors have no
// memory, and stages know what to do with them.
bool has_view(const py::object& tensor, TensorView& view) {
  try {
    return bridge::view_of(tensor, view);
  } catch (const Error&) {
    return false;
  }
}

// The number of bytes from a view's first element to the end of its last one.
int64_t extent(const TensorView& view) {
  int64_t last = 0;
  for (int i = 0; i < view.rank; ++i) last += (view.size(i) - 1) * view.stride(i);
  return (last + 1) * size_of(view.dtype);
}

using Address = std::tuple<uintptr_t, int64_t, int, int64_t>;  // address, bytes, slot, offset
using Allocation = std::optional<py::tuple>;  // arguments of the allocators; none: no tensor
using Uses = std::pair<int, int>;  // first and last call with a slot; last is -1 if Python reads it

// The slots are, in this order: the inputs, scratch memory, and the tensors of the other
// allocations. A tensor comes from the first allocator that returns one on the device of the
// inputs. It is allocated before the first call that uses its slot, and dropped after the last one.
class Recording {
 public:
  Recording(const std::vector<TensorView>& inputs, const std::vector<Allocation>& allocations,
            const std::vector<py::object>& allocators, const py::list& persistent)
      : inputs_(inputs),
        allocations_(allocations),
        allocators_(allocators),
        persistent_(persistent) {
    for (const TensorView& input : inputs)
      if (input) device_ = input.device;
    const Allocation& scratch = allocations_.at(0);
    if (scratch) scratch_bytes_ = py::cast<int64_t>(py::tuple((*scratch)[0])[0]);
  }

  // Takes over the calls of a recorder. Returns "", or the reason why they cannot be repeated.
  // `addresses` has an `Address` for each tensor with memory in a slot, `uses` a `Uses` for each
  // slot.
  std::string place(const Recorder& recorder, const py::list& addresses, const py::list& uses) {
    Ranges ranges;
    for (const auto& tensor : persistent_) {
      const auto view = py::cast<TensorView>(tensor);
      if (view.data == nullptr) continue;
      int64_t& bytes = ranges[reinterpret_cast<uintptr_t>(view.data)].bytes;
      bytes = std::max(bytes, extent(view));  // tensors may begin at one address
    }
    for (const auto& range : addresses) {
      const auto [address, bytes, slot, offset] = py::cast<Address>(range);
      ranges[address] = {bytes, {slot, offset}};
    }
    std::string problem;
    for (const auto& call : recorder.calls)
      if (!call->place(ranges, device_, problem)) return problem;
    calls_ = recorder.calls;
    find_sums(uses);
    made_.resize(calls_.size() + 1);
    dropped_.resize(calls_.size());
    for (size_t slot = 0; slot < uses.size(); ++slot) {
      const auto [first, last] = py::cast<Uses>(uses[slot]);
      if (slot >= inputs_.size()) made_.at(static_cast<size_t>(first)).push_back(slot);
      if (last >= 0) dropped_.at(static_cast<size_t>(last)).push_back(slot);
    }
    return {};
  }

  // Runs all calls. Returns the tensors of all slots, inputs included; those that were dropped
  // after their last use are None. `inputs` is emptied, so that inputs can be freed as well.
  // Returns None, without having done anything, if an input differs from the recorded one in shape,
  // strides, dtype or device, or is not aligned.
  std::optional<py::list> run(py::list& inputs) const {
    const size_t count = inputs_.size();
    if (inputs.size() != count) return std::nullopt;
    Memory memory(count + allocations_.size());
    for (size_t i = 0; i < count; ++i) {
      const py::object tensor = inputs[i];
      TensorView view;
      if (!tensor.is_none() && !has_view(tensor, view)) return std::nullopt;
      if (!same(view, inputs_[i]) || !aligned(view)) return std::nullopt;
      memory.put(i, tensor, view);
    }
    PyList_SetSlice(inputs.ptr(), 0, static_cast<py::ssize_t>(count), nullptr);
    const RecordingScratch scratch(device_, scratch_bytes_);
    const auto make_for = [&](size_t call) {
      for (const size_t slot : made_[call]) {
        if (slot == count && scratch.view())
          memory.put(count, py::none(), scratch.view());
        else
          make(allocations_[slot - count], memory, slot);
      }
    };
    SumsAtEnd sums(adds_up_ ? device_ : Device{});
    for (size_t i = 0; i < calls_.size(); ++i) {
      make_for(i);
      calls_[i]->run(memory.bases, sums.usable() && at_end_[i] ? &sums : nullptr);
      for (const size_t slot : dropped_[i]) memory.put(slot, py::none(), {});
    }
    sums.add_up();
    make_for(calls_.size());
    return memory.tensors;
  }

 private:
  // The sums of a call can be added up at the end if Python reads them, but no later call does.
  void find_sums(const py::list& uses) {
    std::vector<bool> only_python(uses.size());
    for (size_t slot = 0; slot < uses.size(); ++slot)
      only_python[slot] = py::cast<Uses>(uses[slot]).second < 0;
    const auto can_wait = [&](int slot) {
      return slot >= 0 && only_python[static_cast<size_t>(slot)];
    };
    at_end_.resize(calls_.size());
    for (size_t i = calls_.size(); i-- > 0;) {
      const std::vector<int> sums = calls_[i]->slots_of_sums();
      at_end_[i] = !sums.empty() && std::ranges::all_of(sums, can_wait);
      adds_up_ = adds_up_ || at_end_[i];
      for (const int slot : calls_[i]->slots())
        if (slot >= 0) only_python[static_cast<size_t>(slot)] = false;
    }
  }

  struct Memory {
    explicit Memory(size_t slots) : tensors(slots), bases(slots) {}

    void put(size_t slot, const py::object& tensor, const TensorView& view) {
      PyList_SetItem(tensors.ptr(), static_cast<py::ssize_t>(slot), tensor.inc_ref().ptr());
      bases[slot] = static_cast<char*>(view.data);
    }

    py::list tensors;
    Bases bases;
  };

  void make(const Allocation& allocation, Memory& memory, size_t slot) const {
    if (!allocation) return memory.put(slot, py::none(), {});
    for (const py::object& allocate : allocators_) {
      PyObject* made = PyObject_CallObject(allocate.ptr(), allocation->ptr());
      if (made == nullptr) throw py::error_already_set();
      const auto tensor = py::reinterpret_steal<py::object>(made);
      const auto view = py::cast<TensorView>(tensor);
      if (view.device == device_) return memory.put(slot, tensor, view);
    }
    fail(Kind::Internal, kOp, "expected an allocator of ", device_, ", got none");
  }

  std::vector<std::shared_ptr<RecordedCall>> calls_;
  std::vector<bool> at_end_;                  // whether the sums of a call are added up at the end
  bool adds_up_ = false;                      // whether those of any call are
  std::vector<std::vector<size_t>> made_;     // slots to make before each call, and after the last
  std::vector<std::vector<size_t>> dropped_;  // slots to drop after each call
  std::vector<TensorView> inputs_;
  std::vector<Allocation> allocations_;
  std::vector<py::object> allocators_;
  py::list persistent_;  // references, so that their addresses are not reused
  Device device_;
  int64_t scratch_bytes_ = 0;
};

}  // namespace

std::optional<BufferSlice> find(const Ranges& ranges, const TensorView& view) {
  const auto address = reinterpret_cast<uintptr_t>(view.data);
  auto next = ranges.upper_bound(address);
  if (next == ranges.begin()) return std::nullopt;
  const auto& [start, range] = *--next;
  const auto distance = static_cast<int64_t>(address - start);
  if (distance >= range.bytes || distance + extent(view) > range.bytes) return std::nullopt;
  if (range.slice.slot < 0) return BufferSlice{};
  return BufferSlice{range.slice.slot, range.slice.offset + distance};
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

void bind_recording(py::module_& m) {
  using py::arg;
  py::class_<Recorder>(m, "Recorder")
      .def(py::init())
      .def("start", [](Recorder& self) { Recorder::active() = &self; })
      .def("stop", [](Recorder&) { Recorder::active() = nullptr; })
      .def("addresses", [](const Recorder& self) {
        std::vector<std::vector<uintptr_t>> found;
        for (const auto& call : self.calls) found.push_back(call->addresses());
        return found;
      });
  py::class_<Recording>(m, "Recording")
      .def(py::init<const std::vector<TensorView>&, const std::vector<Allocation>&,
                    const std::vector<py::object>&, const py::list&>(),
           arg("inputs"), arg("allocations"), arg("allocators"), arg("persistent"))
      .def("place", &Recording::place, arg("recorder"), arg("addresses"), arg("uses"))
      .def("run", &Recording::run, arg("inputs"));
  m.def("is_recording", [] { return Recorder::active() != nullptr; });
  m.def(
      "set_gemm_definition", [](const py::object& definition) { gemm_definition() = definition; },
      arg("definition"));
}

}  // namespace te::bindings
