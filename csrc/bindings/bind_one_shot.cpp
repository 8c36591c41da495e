// Binding of one_shot, and the numbers by which Python lays out its memory.
#include "bindings/bindings.h"
#include "bindings/recording.h"
#include "bindings/tensor_bridge.h"
#include "ops/one_shot.h"

namespace te::bindings {
namespace {

void one_shot_into(const TensorView& x, const TensorView& out, const TensorView& memory,
                   const TensorView& group, bool scatters, int combine) {
  one_shot({.x = x,
            .out = out,
            .memory = memory,
            .group = group,
            .scatters = scatters,
            .combine = static_cast<Combine>(combine)},
           bridge::current_stream(x.device));
}

}  // namespace

void bind_one_shot(pybind11::module_& m) {
  using pybind11::arg;
  m.def("one_shot", recordable<&one_shot_into>, arg("x"), arg("out"), arg("memory"), arg("group"),
        arg("scatters"), arg("combine"));
  m.def(
      "one_shot_header", [](int ranks) { return one_shot_header(ranks); }, arg("ranks"));
  m.def("one_shot_most_ranks", [] { return kOneShotMostRanks; });
}

}  // namespace te::bindings
