// A program: calls of ops, recorded once and then run on other memory by one call.
//
// While a recorder is active on a thread, ops bound with `recorded<>` note their arguments and do
// nothing. `Recorder::program` then says for every address that was noted where it lies: in which
// tensor that a run will bring (a slot), and how far from its start. Addresses outside all regions
// stay what they are: the scales and amaxes of a module, which live as long as its programs.
#pragma once

#include <pybind11/pybind11.h>

#include <array>
#include <map>
#include <memory>
#include <optional>
#include <tuple>
#include <type_traits>
#include <utility>
#include <vector>

#include "bindings/tensor_bridge.h"

namespace te::bindings {

// Memory known by its place: `slot` counts the tensors that a run brings.
struct Place {
  int slot = -1;  // -1: the address that was recorded
  int64_t offset = 0;
};

// [address, address + bytes) of the recording lies at `place`.
struct Region {
  int64_t bytes;
  Place place;
};

using Regions = std::map<uintptr_t, Region>;
using Bases = std::vector<char*>;

std::optional<Place> find(const Regions& regions, const TensorView& view);

// A gemm that is not the library's to do (on the CPU, say): Python evaluates the definition. A
// tensor is (address, dtype, sizes, index of the CUDA device or -1).
void run_definition(const std::vector<pybind11::object>& arguments);
pybind11::object describe_memory(const TensorView& view);

class Step {
 public:
  virtual ~Step() = default;
  virtual std::vector<uintptr_t> addresses() const = 0;
  virtual void place(const Regions& regions, Device device) = 0;
  virtual void run(const Bases& bases) const = 0;
};

class Recorder {
 public:
  static Recorder*& active();  // of this thread; null where none is

  void add(std::unique_ptr<Step> step) { steps.push_back(std::move(step)); }

  std::vector<std::shared_ptr<Step>> steps;
};

template <auto op, class... Args>
class StepOf final : public Step {
 public:
  explicit StepOf(const Args&... args) : arguments_(args...) {}

  std::vector<uintptr_t> addresses() const override {
    std::vector<uintptr_t> found;
    each(arguments_, [&](size_t, const TensorView& view) {
      found.push_back(reinterpret_cast<uintptr_t>(view.data));
    });
    return found;
  }

  void place(const Regions& regions, Device device) override {
    each(arguments_, [&](size_t i, TensorView& view) {
      if (const auto found = find(regions, view)) {
        places_[i] = *found;
        view.device = device;
      }
    });
  }

  void run(const Bases& bases) const override {
    auto arguments = arguments_;  // another thread may run the same step
    each(arguments, [&](size_t i, TensorView& view) {
      const Place place = places_[i];
      if (place.slot >= 0) view.data = bases[static_cast<size_t>(place.slot)] + place.offset;
    });
    if constexpr (std::is_void_v<decltype(std::apply(op, arguments))>) {
      std::apply(op, arguments);
    } else if (!std::apply(op, arguments)) {
      define(arguments);
    }
  }

 private:
  using Arguments = std::tuple<Args...>;

  // Calls `use(index, view)` for the tensors that are there.
  template <class Tuple, class Use>
  static void each(Tuple& arguments, const Use& use) {
    [&]<size_t... i>(std::index_sequence<i...>) {
      const auto visit = [&](size_t index, auto& argument) {
        if constexpr (std::is_same_v<std::remove_cvref_t<decltype(argument)>, TensorView>)
          if (argument) use(index, argument);
      };
      (visit(i, std::get<i>(arguments)), ...);
    }
    (std::index_sequence_for<Args...>{});
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
  std::array<Place, sizeof...(Args)> places_{};
};

// What Python calls: `op`, or the note that it was called. A recorded call counts as done.
template <auto op>
struct Recorded;

template <class Result, class... Args, Result (*op)(Args...)>
struct Recorded<op> {
  static Result call(Args... args) {
    Recorder* recorder = Recorder::active();
    if (recorder == nullptr) return op(args...);
    recorder->add(std::make_unique<StepOf<op, std::remove_cvref_t<Args>...>>(args...));
    if constexpr (std::is_same_v<Result, bool>) return true;
  }
};

template <auto op>
inline constexpr auto recorded = &Recorded<op>::call;

void bind_program(pybind11::module_& m);

}  // namespace te::bindings
