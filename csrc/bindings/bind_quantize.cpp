// Bindings of quantize and quantize_blocks. An FP8 format is passed as an integer: the value of
// DType, for quantize_blocks with the kind of blocks added (quantized_args.h).
#include <pybind11/stl.h>

#include "bindings/bindings.h"
#include "bindings/quantized_args.h"
#include "bindings/recording.h"
#include "bindings/workspace.h"
#include "ops/quantize.h"
#include "ops/quantize_blocks.h"

namespace te::bindings {
namespace {

using Views = std::vector<TensorView>;

void quantize_into(const TensorView& x, const TensorView& rowwise, const TensorView& columnwise,
                   const TensorView& scales, const TensorView& scale, const TensorView& amax,
                   int format, const SumsOutput& dbias, const TensorView& moments,
                   const TensorView& active) {
  const Stream stream = bridge::current_stream(x.device);
  const QuantizeArgs args{
      .x = x,
      .out = quantized_view(rowwise, columnwise, scales, scale, amax, static_cast<DType>(format)),
      .dbias = dbias.to,
      .workspace = column_sum_workspace(dbias, x, stream),
      .moments = moments_sink(moments, active, x, stream)};
  quantize(args, stream);
}

// Tensor i of a list of `count` tensors, or an absent one if the list is empty.
TensorView optional_of(const Views& views, size_t i, size_t count) {
  if (views.empty()) return {};
  require(views.size() == count, Kind::Value, "quantize_many", "expected ", count,
          " tensors or none, got ", views.size());
  return views[i];
}

void quantize_many_into(const Views& tensors, const Views& rowwise, const Views& columnwise,
                        const Views& pairs, const Views& scales, const Views& amaxes, int format) {
  const size_t count = tensors.size();
  std::vector<QuantizeArgs> all(count);
  for (size_t i = 0; i < count; ++i) {
    all[i].x = tensors[i];
    all[i].out = quantized_view(optional_of(rowwise, i, count), optional_of(columnwise, i, count),
                                optional_of(pairs, i, count), optional_of(scales, i, count),
                                optional_of(amaxes, i, count), static_cast<DType>(format));
  }
  const Device device = count == 0 ? Device{} : tensors.front().device;
  quantize_many(all, bridge::current_stream(device));
}

void quantize_blocks_into(const TensorView& x, const TensorView& rowwise,
                          const TensorView& row_scales, const TensorView& columnwise,
                          const TensorView& column_scales, int format, bool power_of_2,
                          double epsilon, const SumsOutput& dbias) {
  const Stream stream = bridge::current_stream(x.device);
  QuantizeBlocksArgs args{.x = x,
                          .dtype = codec_of(format),
                          .blocks = blocks_of(format),
                          .power_of_2 = power_of_2,
                          .epsilon = static_cast<float>(epsilon),
                          .rowwise = {rowwise, row_scales},
                          .columnwise = {columnwise, column_scales},
                          .dbias = dbias.to,
                          .workspace = column_sum_workspace(dbias, x, stream)};
  quantize_blocks(args, stream);
}

}  // namespace

void bind_quantize(pybind11::module_& m) {
  using pybind11::arg;
  using pybind11::none;
  m.def("quantize", recordable<&quantize_into>, arg("x"), arg("rowwise"), arg("columnwise"),
        arg("scales"), arg("scale"), arg("amax"), arg("format"), arg("dbias") = none(),
        arg("moments") = none(), arg("active") = none());
  m.def("quantize_many", recordable<&quantize_many_into>, arg("tensors"), arg("rowwise"),
        arg("columnwise"), arg("pairs"), arg("scales"), arg("amaxes"), arg("format"));
  m.def("quantize_blocks", recordable<&quantize_blocks_into>, arg("x"), arg("rowwise"),
        arg("row_scales"), arg("columnwise"), arg("column_scales"), arg("format"),
        arg("power_of_2"), arg("epsilon"), arg("dbias") = none());
}

}  // namespace te::bindings
