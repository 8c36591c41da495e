#include "ops/attention.h"

#include <initializer_list>

#include "ops/check.h"

namespace te {
namespace {

constexpr const char* kOp = "attention";

void check_input(const TensorView& t, const TensorView& query, AttentionFormat format,
                 std::string_view name) {
  const int rank = format == AttentionFormat::Thd ? 3 : 4;
  require(t.rank == rank && t.numel() > 0 && t.stride(-1) == 1, Kind::Value, kOp, "expected ", name,
          " of ", rank, " axes, of which none is empty and the last is contiguous, got ", t);
  check::dtype(t, query.dtype, kOp, name);
  check::same_device(t, query, kOp, name);
}

void check_inputs(const AttentionArgs& args) {
  const AttentionFormat format = args.settings.format;
  const TensorView &q = args.query, &k = args.key, &v = args.value;
  require(q.device.type == DeviceType::CUDA, Kind::Unsupported, kOp,
          "expected tensors on a GPU, got ", q);
  const bool fits_kind = args.fp8 ? q.dtype == DType::Float8E4M3
                                  : q.dtype == DType::Float16 || q.dtype == DType::BFloat16;
  require(fits_kind, Kind::Type, kOp, "expected ", args.fp8 ? "float8_e4m3" : "float16 or bfloat16",
          " for query, got ", q.dtype);
  check_input(q, q, format, "query");
  check_input(k, q, format, "key");
  check_input(v, q, format, "value");
  const int batch = format == AttentionFormat::Sbhd ? 1 : 0;
  bool fits = q.size(-1) == k.size(-1) && k.size(-2) == v.size(-2) && k.size(0) == v.size(0) &&
              q.size(-2) % k.size(-2) == 0;
  if (format != AttentionFormat::Thd)
    fits = fits && q.size(batch) == k.size(batch) && k.size(1) == v.size(1);
  require(fits, Kind::Value, kOp, "expected query, key and value that belong together, got shapes ",
          ShapeOf{q}, ", ", ShapeOf{k}, " and ", ShapeOf{v});
}

void check_sequences(const AttentionArgs& args) {
  const AttentionSequences &query_sequences = args.query_sequences,
                           &key_sequences = args.key_sequences;
  const bool packed = args.settings.format == AttentionFormat::Thd;
  if (!query_sequences.ends && !key_sequences.ends && !packed) return;
  const int64_t count = packed ? query_sequences.ends.numel()
                               : args.query.size(args.settings.format == AttentionFormat::Sbhd) + 1;
  for (const auto* side : {&query_sequences, &key_sequences}) {
    check::vector(side->ends, count, DType::Int32, args.query, kOp, "the ends of sequences");
    if (side->starts)
      check::vector(side->starts, count, DType::Int32, args.query, kOp, "the starts of sequences");
    require(!packed || (count > 1 && side->longest > 0), Kind::Value, kOp,
            "expected at least one sequence and the length of the longest, got ", count - 1,
            " and ", side->longest);
  }
}

void check_bias(const AttentionArgs& args) {
  const AttentionFormat format = args.settings.format;
  require(format != AttentionFormat::Thd, Kind::Unsupported, kOp, "expected no bias for thd, got ",
          args.bias);
  const int token = format == AttentionFormat::Sbhd ? 0 : 1;
  const TensorView &bias = args.bias, &q = args.query;
  const bool fits = bias.rank == 4 && (bias.size(0) == 1 || bias.size(0) == q.size(1 - token)) &&
                    (bias.size(1) == 1 || bias.size(1) == q.size(2)) &&
                    bias.size(2) == q.size(token) && bias.size(3) == args.key.size(token);
  require(fits, Kind::Value, kOp,
          "expected a bias of [1 or batch, 1 or heads, queries, keys] for query of shape ",
          ShapeOf{q}, " and key of shape ", ShapeOf{args.key}, ", got ", ShapeOf{bias});
}

void check_extras(const AttentionArgs& args) {
  const int64_t heads = args.query.size(-2);
  if (args.bias) {
    check::contiguous(args.bias, kOp, "the bias");
    check::high_precision(args.bias, kOp, "the bias");
    check::same_device(args.bias, args.query, kOp, "the bias");
    check_bias(args);
  }
  if (args.sink) check::vector(args.sink, heads, DType::Float32, args.query, kOp, "the sink");
  const bool drops = args.settings.dropout > 0.0f;
  require(drops == static_cast<bool>(args.seed), Kind::Value, kOp,
          "expected a seed with dropout and none without, got dropout ", args.settings.dropout);
  if (drops) check::vector(args.seed, 2, DType::Int64, args.query, kOp, "the seed");
}

// Checks the result or its gradient: contiguous, with the heads of query and the size of value.
void check_out(const TensorView& out, DType dtype, const AttentionArgs& args,
               std::string_view name) {
  check::contiguous(out, kOp, name);
  check::dtype(out, dtype, kOp, name);
  check::same_device(out, args.query, kOp, name);
  bool fits = out.rank == args.query.rank && out.size(-1) == args.value.size(-1);
  for (int i = 0; fits && i + 1 < out.rank; ++i) fits = out.size(i) == args.query.size(i);
  require(fits, Kind::Value, kOp, "expected ", name, " of the query's shape ", ShapeOf{args.query},
          " with the value's size ", args.value.size(-1), ", got ", ShapeOf{out});
}

void check_results(const AttentionArgs& args) {
  check_out(args.out, args.query.dtype, args, "the result");
  if (!args.statistics) return;
  check::vector(args.statistics, args.out.numel() / args.out.size(-1), DType::Float32, args.query,
                kOp, "the statistics");
}

// Gradients of query, key and value may be parts of one tensor, like the inputs. With padded
// sequences, rows outside the sequences are set to zero, so all rows must be at equal distances.
// With packed sequences, cuDNN can only write gradients with the strides of the inputs.
void check_gradient(const TensorView& t, const TensorView& like, const AttentionArgs& args,
                    DType dtype, std::string_view name) {
  bool fits = t.rank == like.rank && t.stride(-1) == 1;
  if (fits && args.query_sequences.ends && t.rank == 4)
    fits = t.size(0) == 1 || t.stride(0) == t.size(1) * t.stride(1);
  for (int i = 0; fits && args.packed() && i < t.rank - 2; ++i)
    fits = t.size(i) == 1 || t.stride(i) == like.stride(i);
  for (int i = 0; fits && i < t.rank; ++i) fits = t.size(i) == like.size(i);
  require(fits, Kind::Value, kOp, "expected ", name, " of shape ", ShapeOf{like},
          ", of which the last axis is contiguous, got ", t);
  check::dtype(t, dtype, kOp, name);
  check::same_device(t, like, kOp, name);
}

void check_gradients(const AttentionArgs& args, const AttentionGradients& gradients) {
  require(static_cast<bool>(args.statistics), Kind::Value, kOp,
          "expected the statistics that the forward left, got none");
  const bool fp8 = args.fp8 && is_fp8(gradients.out.dtype);
  const DType dtype = fp8 ? gradients.out.dtype : args.query.dtype;
  check_out(gradients.out, dtype, args, "the gradient of the result");
  check_gradient(gradients.query, args.query, args, dtype, "the gradient of query");
  check_gradient(gradients.key, args.key, args, dtype, "the gradient of key");
  check_gradient(gradients.value, args.value, args, dtype, "the gradient of value");
  if (gradients.bias)
    check::alike(gradients.bias, args.query.dtype, args.bias, kOp, "the gradient of the bias");
  if (gradients.sink) check::same_shape(gradients.sink, args.sink, kOp, "the gradient of the sink");
}

void check_fp8(const AttentionArgs& args, bool backward) {
  if (!args.fp8) return;
  const bool plain = !args.bias && !args.sink && !args.seed && !args.query_sequences.ends &&
                     !args.key_sequences.ends;
  require(plain, Kind::Unsupported, kOp,
          "expected no bias, sink, dropout and unequal sequences in FP8, got some");
  const AttentionFp8& fp8 = args.fp8;
  constexpr size_t kSoftmax = 1;
  const auto scales = static_cast<size_t>(AttentionFp8::scale_count(backward));
  for (size_t i = 0; i < scales; ++i)
    if (i != kSoftmax || fp8.scales[i])
      check::vector(fp8.scales[i], 1, DType::Float32, args.query, kOp, "a scale");
  const auto amaxes = static_cast<size_t>(AttentionFp8::amax_count(backward));
  for (size_t i = 0; i < amaxes; ++i)
    if (fp8.amaxes[i]) check::vector(fp8.amaxes[i], 1, DType::Float32, args.query, kOp, "an amax");
  check::vector(fp8.pairs, AttentionFp8::room(backward), DType::Float32, args.query, kOp,
                "the pairs of scales and the amaxes");
}

}  // namespace

int64_t attention_workspace_bytes(const AttentionArgs& args, const AttentionGradients* gradients,
                                  Stream stream) {
  check_inputs(args);
  check_sequences(args);
  check_extras(args);
  check_results(args);
  check_fp8(args, gradients != nullptr);
  if (gradients != nullptr) check_gradients(args, *gradients);
  return cuda::attention_workspace_bytes(args, gradients, stream);
}

void attention(const AttentionArgs& args, const AttentionGradients* gradients,
               const TensorView& workspace, Stream stream) {
  if (workspace) {
    check::contiguous(workspace, kOp, "the workspace");
    check::same_device(workspace, args.query, kOp, "the workspace");
  }
  cuda::attention(args, gradients, workspace, stream);
}

}  // namespace te
