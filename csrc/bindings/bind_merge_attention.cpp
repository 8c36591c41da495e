// Binding of merge_attention.
#include "bindings/bindings.h"
#include "bindings/recording.h"
#include "bindings/tensor_bridge.h"
#include "ops/merge_attention.h"

namespace te::bindings {
namespace {

void merge_attention_into(const TensorView& out, const TensorView& log_sum_exp,
                          const TensorView& part, const TensorView& part_log_sum_exp) {
  merge_attention(
      {.out = out, .log_sum_exp = log_sum_exp, .part = part, .part_log_sum_exp = part_log_sum_exp},
      bridge::current_stream(out.device));
}

}  // namespace

void bind_merge_attention(pybind11::module_& m) {
  using pybind11::arg;
  m.def("merge_attention", recordable<&merge_attention_into>, arg("out"), arg("log_sum_exp"),
        arg("part"), arg("part_log_sum_exp"));
}

}  // namespace te::bindings
