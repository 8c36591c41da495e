// Bindings of gemm. Arguments are flat, because to build a Python object for each call would cost
// more than the launch. A format is -1 for a plain operand, else the number of the FP8 format and
// of the blocks that have scales (quantized_args.h).
#include <pybind11/stl.h>

#include <tuple>

#include "bindings/bindings.h"
#include "bindings/quantized_args.h"
#include "bindings/recording.h"
#include "bindings/workspace.h"
#include "ops/gemm.h"
#include "ops/gemm_tuning.h"

namespace te::bindings {
namespace {

namespace py = pybind11;

bool run(GemmArgs args) {
  const Device device = args.a.data.device;
  const Stream stream = bridge::current_stream(device);
  std::tie(args.workspace, args.counts_tiles) = gemm_workspace(device, stream);
  return gemm(args, stream);
}

constexpr int kPlain = -1;

// The op checks the tensors, but a view has the format that is put into it here, so the format is
// checked here.
GemmOperand operand(const TensorView& data, const TensorView& scales, int format, bool transposed) {
  if (format == kPlain) return {data, scales, transposed};
  require(format >= 0 && is_fp8(codec_of(format)) && blocks_of(format) <= ScaleBlocks::Squares,
          Kind::Value, "gemm", "expected -1 or a format of FP8 codes, got ", format);
  require(size_of(data.dtype) == 1, Kind::Type, "gemm", "expected FP8 codes of one byte, got ",
          data.dtype);
  return {data.as(codec_of(format)), scales, transposed, blocks_of(format)};
}

bool gemm_into(const TensorView& d, const TensorView& a, const TensorView& b,
               const TensorView& a_scales, const TensorView& b_scales, int a_format, int b_format,
               bool a_transposed, bool b_transposed, bool fast_accumulation,
               const TensorView& addend, const TensorView& bias, bool allow_tf32) {
  return run({.a = operand(a, a_scales, a_format, a_transposed),
              .b = operand(b, b_scales, b_format, b_transposed),
              .d = d,
              .fast_accumulation = fast_accumulation,
              .addend = addend,
              .bias = bias,
              .workspace = {},
              .allow_tf32 = allow_tf32});
}

}  // namespace

void bind_gemm(pybind11::module_& m) {
  using pybind11::arg;
  using pybind11::none;
  m.def("gemm", recordable<&gemm_into>, arg("d"), arg("a"), arg("b"), arg("a_scales"),
        arg("b_scales"), arg("a_format"), arg("b_format"), arg("a_transposed"), arg("b_transposed"),
        arg("fast_accumulation"), arg("addend"), arg("bias"), arg("allow_tf32"));
  m.def("gemm_plan_count", &cuda::gemm_plan_count);
  m.def("gemm_problem", &cuda::gemm_problem);
  m.def("gemm_algorithm", &cuda::gemm_algorithm);
  m.def("gemm_guesses", &cuda::gemm_guesses, arg("limit"));
  m.def("gemm_neighbours", &cuda::gemm_neighbours, arg("algorithm"));
  m.def("gemm_use", &cuda::gemm_use, arg("algorithm"));
  m.def("gemm_use_guess", &cuda::gemm_use_guess);
}

}  // namespace te::bindings
