// Bindings of attention.
#include <pybind11/stl.h>

#include <algorithm>
#include <array>
#include <bit>
#include <optional>

#include "bindings/bindings.h"
#include "bindings/quantized_args.h"
#include "bindings/recording.h"
#include "bindings/tensor_bridge.h"
#include "bindings/workspace.h"
#include "ops/attention.h"

namespace te::bindings {
namespace {

namespace py = pybind11;

// Format, left, right, bottom right, ALiBi, deterministic, and the lengths of the longest sequences
// of queries and of keys.
using Settings = std::array<int64_t, 8>;

struct Factors {
  float scale, dropout;
};

using Inputs = std::array<TensorView, 3>;     // query, key, value
using Sequences = std::array<TensorView, 4>;  // cu_seqlens of queries and keys, then padded ones
using Extras = std::array<TensorView, 3>;     // bias, sink, seed
using Results = std::array<TensorView, 2>;    // result, statistics

// A view of shape [..., heads, size]. A tensor with one axis less than query has its last axis
// split.
TensorView with_heads(TensorView t, const TensorView& query) {
  if (t.rank == 0 || t.rank + 1 != query.rank) return t;
  const int64_t heads = query.size(-2), features = t.size(-1), stride = t.stride(-1);
  if (heads == 0 || features % heads != 0) return t;  // the op will refuse its shape
  const auto last = static_cast<size_t>(t.rank++);
  t.sizes[last - 1] = heads;
  t.strides[last - 1] = features / heads * stride;
  t.sizes[last] = features / heads;
  t.strides[last] = stride;
  return t;
}

AttentionArgs arguments(const Inputs& inputs, const Settings& settings, Factors factors,
                        const Sequences& sequences, const Extras& extras, const Results& results) {
  const auto [format, left, right, bottom_right, alibi, deterministic, queries, keys] = settings;
  return {.query = inputs[0],
          .key = inputs[1],
          .value = inputs[2],
          .query_sequences = {.ends = sequences[0], .starts = sequences[2], .longest = queries},
          .key_sequences = {.ends = sequences[1], .starts = sequences[3], .longest = keys},
          .settings = {.format = static_cast<AttentionFormat>(format),
                       .left = left,
                       .right = right,
                       .bottom_right = bottom_right != 0,
                       .scale = factors.scale,
                       .dropout = factors.dropout,
                       .alibi = alibi != 0,
                       .deterministic = deterministic != 0},
          .bias = extras[0],
          .sink = extras[1],
          .seed = extras[2],
          .out = with_heads(results[0], inputs[0]),
          .statistics = results[1],
          .fp8 = {}};
}

void run(const AttentionArgs& args, const AttentionGradients* gradients) {
  const Stream stream = bridge::current_stream(args.query.device);
  const int64_t bytes = attention_workspace_bytes(args, gradients, stream);
  if (bytes <= kLargestScratch) {
    // Packed sequences need workspaces of many sizes. With powers of two the buffer seldom grows.
    const auto room = std::bit_ceil(static_cast<uint64_t>(bytes));
    const TensorView scratch =
        bytes == 0 ? TensorView{}
                   : attention_workspace(args.query.device, stream, static_cast<int64_t>(room));
    return attention(args, gradients, scratch, stream);
  }
  const py::object scratch = large_scratch(args.query.device, bytes);
  attention(args, gradients, py::cast<TensorView>(scratch), stream);
}

void attention_forward_into(const Inputs& inputs, const Settings& settings, float scale,
                            float dropout, const Sequences& sequences, const Extras& extras,
                            const Results& results) {
  run(arguments(inputs, settings, {scale, dropout}, sequences, extras, results), nullptr);
}

// `gradients`: that of the result, which is read, then those of query, key, value, bias and sink,
// which are written.
void attention_backward_into(const Inputs& inputs, const Settings& settings, float scale,
                             float dropout, const Sequences& sequences, const Extras& extras,
                             const Results& results, const std::array<TensorView, 6>& gradients) {
  const auto& [out, query, key, value, bias, sink] = gradients;
  const AttentionGradients grads{.out = with_heads(out, inputs[0]),
                                 .query = query,
                                 .key = key,
                                 .value = value,
                                 .bias = bias,
                                 .sink = sink};
  run(arguments(inputs, settings, {scale, dropout}, sequences, extras, results), &grads);
}

using Views = std::vector<TensorView>;

// Python passes FP8 codes as uint8. Those of query, key, value and the result are E4M3.
AttentionArgs fp8_arguments(const Inputs& inputs, const Settings& settings, float scale,
                            const Results& results, const TensorView& pairs, const Views& scales,
                            const Views& amaxes) {
  const auto codes = [](const TensorView& t) { return with_format(t, DType::Float8E4M3); };
  AttentionArgs args = arguments({codes(inputs[0]), codes(inputs[1]), codes(inputs[2])}, settings,
                                 {scale, 0.0f}, {}, {}, {codes(results[0]), results[1]});
  AttentionFp8& fp8 = args.fp8;
  require(scales.size() <= fp8.scales.size() && amaxes.size() <= fp8.amaxes.size(), Kind::Value,
          "attention", "expected up to ", fp8.scales.size(), " scales and ", fp8.amaxes.size(),
          " amaxes, got ", scales.size(), " and ", amaxes.size());
  std::ranges::copy(scales, fp8.scales.begin());
  std::ranges::copy(amaxes, fp8.amaxes.begin());
  fp8.pairs = pairs;
  return args;
}

void fp8_attention_forward_into(const Inputs& inputs, const Settings& settings, float scale,
                                const Results& results, const TensorView& pairs,
                                const Views& scales, const Views& amaxes) {
  run(fp8_arguments(inputs, settings, scale, results, pairs, scales, amaxes), nullptr);
}

// `gradients`: that of the result, which is read, then those of query, key and value, which are
// written. All are codes of `format`.
void fp8_attention_backward_into(const Inputs& inputs, const Settings& settings, float scale,
                                 const Results& results, const TensorView& pairs,
                                 const Views& scales, const Views& amaxes,
                                 const std::array<TensorView, 4>& gradients, int format) {
  const auto codes = [&](int i) {
    return with_format(gradients[static_cast<size_t>(i)], static_cast<DType>(format));
  };
  const AttentionGradients grads{.out = with_heads(codes(0), inputs[0]),
                                 .query = codes(1),
                                 .key = codes(2),
                                 .value = codes(3),
                                 .bias = {},
                                 .sink = {}};
  run(fp8_arguments(inputs, settings, scale, results, pairs, scales, amaxes), &grads);
}

// A contiguous CUDA tensor without memory, to ask whether cuDNN takes it; absent without sizes.
TensorView imagined(const std::vector<int64_t>& sizes, DType dtype, int device) {
  TensorView view{.dtype = dtype, .device = {DeviceType::CUDA, device}};
  if (sizes.empty()) return view;
  view.rank = static_cast<int32_t>(sizes.size());
  int64_t stride = 1;
  for (size_t i = sizes.size(); i-- > 0;) {
    view.sizes[i] = sizes[i];
    view.strides[i] = stride;
    stride *= sizes[i];
  }
  return view;
}

using Sizes = std::vector<int64_t>;

// The reason why cuDNN refuses contiguous tensors of these sizes, or "" if it does not. With
// `training`, the backward is asked for, too.
std::string refusal(const std::array<Sizes, 3>& sizes, int dtype, int device,
                    const Settings& settings, float dropout, bool padded, const Sizes& bias,
                    bool bias_grad, bool sink, bool sink_grad, bool training) {
  const auto type = static_cast<DType>(dtype);
  const bool packed = settings[0] == static_cast<int>(AttentionFormat::Thd);
  const auto of = [&](const Sizes& s) { return imagined(s, type, device); };
  const TensorView query = of(sizes[0]), key = of(sizes[1]), value = of(sizes[2]);
  const int64_t batch = packed ? 1 : sizes[0][settings[0] == 0 ? 1 : 0];
  const TensorView ends = imagined(padded ? Sizes{batch + 1} : Sizes{}, DType::Int32, device);
  const int64_t heads = query.size(-2);
  const TensorView of_sink = imagined(sink ? Sizes{heads} : Sizes{}, DType::Float32, device);
  Sizes out = sizes[0];
  out.back() = sizes[2].back();
  const TensorView statistics = imagined(training ? Sizes{1} : Sizes{}, DType::Float32, device);
  const AttentionArgs args =
      arguments({query, key, value}, settings, {1.0f, dropout}, {ends, ends, {}, {}},
                {of(bias), of_sink, {}}, {of(out), statistics});
  std::string reason = cuda::attention_refusal(args, nullptr);
  if (!reason.empty() || !training) return reason;
  const AttentionGradients gradients{.out = args.out,
                                     .query = query,
                                     .key = key,
                                     .value = value,
                                     .bias = bias_grad ? args.bias : TensorView{},
                                     .sink = sink_grad ? args.sink : TensorView{}};
  return cuda::attention_refusal(args, &gradients);
}

// The same for FP8. `format` is that of the gradients; None if there is no FP8 backward.
std::string fp8_refusal(const std::array<Sizes, 3>& sizes, int device, const Settings& settings,
                        bool with_statistics, std::optional<int> format) {
  const auto of = [&](const Sizes& s) { return imagined(s, DType::Float8E4M3, device); };
  const Inputs inputs{of(sizes[0]), of(sizes[1]), of(sizes[2])};
  Sizes out = sizes[0];
  out.back() = sizes[2].back();
  const TensorView statistics =
      imagined(with_statistics ? Sizes{1} : Sizes{}, DType::Float32, device);
  AttentionArgs args = arguments(inputs, settings, {1.0f, 0.0f}, {}, {}, {of(out), statistics});
  args.fp8.pairs = imagined({AttentionFp8::room(true)}, DType::Float32, device);
  std::string reason = cuda::attention_refusal(args, nullptr);
  if (!reason.empty() || !format) return reason;
  const auto codes = [&](const TensorView& t) {
    return with_format(t, static_cast<DType>(*format));
  };
  const AttentionGradients gradients{.out = codes(args.out),
                                     .query = codes(inputs[0]),
                                     .key = codes(inputs[1]),
                                     .value = codes(inputs[2]),
                                     .bias = {},
                                     .sink = {}};
  return cuda::attention_refusal(args, &gradients);
}

}  // namespace

void bind_attention(py::module_& m) {
  using py::arg;
  m.def("attention_forward", recordable<&attention_forward_into>, arg("inputs"), arg("settings"),
        arg("scale"), arg("dropout"), arg("sequences"), arg("extras"), arg("results"));
  m.def("attention_backward", recordable<&attention_backward_into>, arg("inputs"), arg("settings"),
        arg("scale"), arg("dropout"), arg("sequences"), arg("extras"), arg("results"),
        arg("gradients"));
  m.def("attention_refusal", &refusal, arg("sizes"), arg("dtype"), arg("device"), arg("settings"),
        arg("dropout"), arg("padded"), arg("bias"), arg("bias_grad"), arg("sink"), arg("sink_grad"),
        arg("training"));
  m.def("fp8_attention_forward", recordable<&fp8_attention_forward_into>, arg("inputs"),
        arg("settings"), arg("scale"), arg("results"), arg("pairs"), arg("scales"), arg("amaxes"));
  m.def("fp8_attention_backward", recordable<&fp8_attention_backward_into>, arg("inputs"),
        arg("settings"), arg("scale"), arg("results"), arg("pairs"), arg("scales"), arg("amaxes"),
        arg("gradients"), arg("format"));
  m.def("fp8_attention_refusal", &fp8_refusal, arg("sizes"), arg("device"), arg("settings"),
        arg("statistics"), arg("format"));
  m.def("attention_graph_count", &cuda::attention_graph_count);
}

}  // namespace te::bindings
