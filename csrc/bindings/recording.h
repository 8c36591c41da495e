// A recording: calls of ops, recorded once and then repeated on other memory by one call.
//
// While a recorder is active on a thread, ops bound with `recordable<>` record their arguments and
// compute nothing. The recording then locates every recorded address: at an offset in a tensor that
// each call brings (a slot), or in a persistent tensor that was named beforehand (scales, amaxes,
// rows of statistics). Calls with any other address are refused, because nothing says how long that
// address is valid.

#pragma once

#include <pybind11/pybind11.h>

#include <algorithm>
#include <array>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <tuple>
#include <type_traits>
#include <utility>
#include <vector>

#include "bindings/tensor_bridge.h"
#include "bindings/workspace.h"

namespace te::bindings {

// A part of a slot's memory. Persistent memory has no slot and keeps the recorded address.
struct BufferSlice {
  int slot = -1;
  int64_t offset = 0;
};

struct MemoryRange {
  int64_t bytes = 0;
  BufferSlice slice;
};

using Ranges = std::map<uintptr_t, MemoryRange>;  // by first address
using Bases = std::vector<char*>;                 // first address of each slot

// The slice that begins at the first address of a view; nothing if no range contains the view.
std::optional<BufferSlice> find(const Ranges& ranges, const TensorView& view);

// Runs a GEMM for which the op has returned false (on the CPU, for instance): Python evaluates its
// definition in torch. describe_memory() makes an argument for Python of a tensor: (address, dtype,
// sizes, index of the CUDA device or -1).
void run_definition(const std::vector<pybind11::object>& arguments);
pybind11::object describe_memory(const TensorView& view);

template <class T>
inline constexpr bool kHoldsViews = std::is_same_v<T, std::vector<TensorView>>;
template <size_t n>
inline constexpr bool kHoldsViews<std::array<TensorView, n>> = true;

// Calls `use(view)` for each tensor of an argument, absent ones included. Other arguments have
// none.
template <class T, class Use>
void each_view(T& argument, const Use& use) {
  if constexpr (std::is_same_v<std::remove_const_t<T>, TensorView>) {
    use(argument);
  } else if constexpr (std::is_same_v<std::remove_const_t<T>, SumsOutput>) {
    use(argument.to);
  } else if constexpr (kHoldsViews<std::remove_const_t<T>>) {
    for (auto& view : argument) use(view);
  }
}

// Calls an op. If all tensors are on the CPU, the GIL is released during the call, so that other
// threads go on. For CUDA it is held, because ops may ask Python for workspaces.
template <auto op, class... Args>
auto call_op(const Args&... args) {
  bool on_cpu = true;
  const auto look = [&](const TensorView& view) {
    if (view) on_cpu = on_cpu && view.device.type == DeviceType::CPU;
  };
  (each_view(args, look), ...);
  std::optional<pybind11::gil_scoped_release> unlocked;
  if (on_cpu) unlocked.emplace();
  return op(args...);
}

// A call of an op with its arguments. `CallOf` implements it for each op.
class RecordedCall {
 public:
  virtual ~RecordedCall() = default;
  virtual std::vector<uintptr_t> addresses() const = 0;
  // Finds the slice of every tensor. Returns false and sets `problem` if a tensor is in no range.
  virtual bool place(const Ranges& ranges, Device device, std::string& problem) = 0;
  // The slots of its tensors, and of its outputs of sums alone; -1 is persistent memory.
  virtual std::vector<int> slots() const = 0;
  virtual std::vector<int> slots_of_sums() const = 0;
  // `sums` adds up the sums of the call; null: the op does.
  virtual void run(const Bases& bases, SumsAtEnd* sums) const = 0;
};

class Recorder {
 public:
  static Recorder*& active();  // the recorder of this thread; null if there is none

  void add(std::unique_ptr<RecordedCall> call) { calls.push_back(std::move(call)); }

  std::vector<std::shared_ptr<RecordedCall>> calls;
};

template <auto op, class... Args>
class CallOf final : public RecordedCall {
 public:
  explicit CallOf(const Args&... args) : arguments_(args...) {
    (each_view(args, [&](const TensorView&) { slices_.emplace_back(); }), ...);
  }

  std::vector<uintptr_t> addresses() const override {
    std::vector<uintptr_t> found;
    each(arguments_, [&](size_t, const TensorView& view) {
      found.push_back(reinterpret_cast<uintptr_t>(view.data));
    });
    return found;
  }

  bool place(const Ranges& ranges, Device device, std::string& problem) override {
    bool known = true;
    each(arguments_, [&](size_t i, TensorView& view) {
      const auto found = find(ranges, view);
      if (!found) {
        known = false;
        problem = concat("memory of ", view, ", which no input, output or persistent tensor holds");
        return;
      }
      slices_[i] = *found;
      if (found->slot >= 0) view.device = device;
    });
    return known;
  }

  std::vector<int> slots() const override {
    std::vector<int> found;
    each(arguments_, [&](size_t i, const TensorView&) { found.push_back(slices_[i].slot); });
    return found;
  }

  std::vector<int> slots_of_sums() const override {
    std::vector<const TensorView*> sums;
    each_sums(arguments_, [&](const SumsOutput& output) { sums.push_back(&output.to); });
    std::vector<int> found;
    each(arguments_, [&](size_t i, const TensorView& view) {
      if (std::ranges::find(sums, &view) != sums.end()) found.push_back(slices_[i].slot);
    });
    return found;
  }

  void run(const Bases& bases, SumsAtEnd* sums) const override {
    auto arguments = arguments_;  // another thread may run the same call
    each(arguments, [&](size_t i, TensorView& view) {
      const BufferSlice slice = slices_[i];
      if (slice.slot >= 0) view.data = bases[static_cast<size_t>(slice.slot)] + slice.offset;
    });
    each_sums(arguments, [&](SumsOutput& output) { output.later = sums; });
    const auto call = [](const Args&... args) { return call_op<op>(args...); };
    if constexpr (std::is_void_v<decltype(std::apply(call, arguments))>) {
      std::apply(call, arguments);
    } else if (!std::apply(call, arguments)) {
      define(arguments);
    }
  }

 private:
  using Arguments = std::tuple<Args...>;

  // Calls `use(index, view)` for the tensors that are there and have elements.
  template <class Tuple, class Use>
  static void each(Tuple& arguments, const Use& use) {
    size_t index = 0;
    const auto visit = [&](auto& view) {
      const size_t i = index++;
      if (view && view.data != nullptr) use(i, view);
    };
    std::apply([&](auto&... argument) { (each_view(argument, visit), ...); }, arguments);
  }

  template <class Tuple, class Use>
  static void each_sums(Tuple& arguments, const Use& use) {
    const auto visit = [&](auto& argument) {
      if constexpr (std::is_same_v<std::remove_cvref_t<decltype(argument)>, SumsOutput>)
        use(argument);
    };
    std::apply([&](auto&... argument) { (visit(argument), ...); }, arguments);
  }

  static void define(const Arguments& arguments) {
    std::vector<pybind11::object> objects;
    const auto append = [&](const auto& argument) {
      if constexpr (std::is_same_v<std::remove_cvref_t<decltype(argument)>, TensorView>)
        objects.push_back(describe_memory(argument));
      else
        objects.push_back(pybind11::cast(argument));
    };
    std::apply([&](const auto&... argument) { (append(argument), ...); }, arguments);
    run_definition(objects);
  }

  Arguments arguments_;
  std::vector<BufferSlice> slices_;
};

// The function that Python calls: it calls the op, or records the call if a recorder is active. A
// recorded GEMM returns true, as if cuBLASLt had computed it.
template <auto op>
struct Recordable;

template <class Result, class... Args, Result (*op)(Args...)>
struct Recordable<op> {
  static Result call(Args... args) {
    Recorder* recorder = Recorder::active();
    if (recorder == nullptr) return call_op<op>(args...);
    recorder->add(std::make_unique<CallOf<op, std::remove_cvref_t<Args>...>>(args...));
    if constexpr (std::is_same_v<Result, bool>) return true;
  }
};

template <auto op>
inline constexpr auto recordable = &Recordable<op>::call;

void bind_recording(pybind11::module_& m);

}  // namespace te::bindings
