// Binding of merge_parts.
#include <pybind11/stl.h>

#include "bindings/bindings.h"
#include "bindings/recording.h"
#include "bindings/tensor_bridge.h"
#include "ops/merge_parts.h"

namespace te::bindings {
namespace {

using Views = std::vector<TensorView>;

void merge_parts_into(const TensorView& out, const TensorView& log_sum_exp, const Views& parts,
                      const Views& part_log_sum_exps, const std::vector<int64_t>& begins,
                      int token_axis, bool fresh) {
  merge_parts({.out = out,
               .log_sum_exp = log_sum_exp,
               .parts = parts,
               .part_log_sum_exps = part_log_sum_exps,
               .begins = begins,
               .token_axis = token_axis,
               .fresh = fresh},
              bridge::current_stream(out.device));
}

}  // namespace

void bind_merge_parts(pybind11::module_& m) {
  using pybind11::arg;
  m.def("merge_parts", recordable<&merge_parts_into>, arg("out"), arg("log_sum_exp"), arg("parts"),
        arg("part_log_sum_exps"), arg("begins"), arg("token_axis"), arg("fresh"));
}

}  // namespace te::bindings
