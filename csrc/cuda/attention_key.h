// What a graph of cuDNN depends on: sizes, strides and options of one direction of attention.
#pragma once

#include <array>
#include <cstddef>
#include <type_traits>

#include "ops/attention.h"

namespace te::cuda {

struct AttentionStrides {
  int64_t batch = 0, head = 0, token = 0;  // in elements; the last axis is contiguous
  bool operator==(const AttentionStrides&) const = default;
};

// All members are 64-bit integers, without padding between them: the bytes of a key can be hashed.
struct AttentionKey {
  int64_t device = 0, dtype = 0, backward = 0;
  int64_t grad_dtype = 0;  // dtype of the gradients, in the backward
  int64_t packed = 0;      // tensors have offsets for each sequence
  int64_t padded = 0;      // cuDNN is told the length of each sequence
  // Of packed tensors, the batch, the longest lengths and the tokens are rounded up, so that few
  // graphs serve all calls.
  int64_t batch = 0, queries = 0, keys = 0, query_tokens = 0, key_tokens = 0;
  int64_t heads = 0, groups = 0, key_size = 0, value_size = 0;
  int64_t left = -1, right = -1, bottom_right = 0;
  int64_t scale_bits = 0, dropout_bits = 0;
  int64_t alibi = 0, deterministic = 0, statistics = 0;
  int64_t bias_batch = 0, bias_heads = 0, bias_dtype = 0, bias_grad = 0;
  int64_t sink = 0, sink_grad = 0;
  AttentionStrides query, key, value, out, grad_query, grad_key, grad_value;

  AttentionKey(const AttentionArgs& args, const AttentionGradients* gradients);
  bool operator==(const AttentionKey&) const = default;

  bool fp8() const { return is_fp8(static_cast<DType>(dtype)); }
  float scale() const;
  float dropout() const;

 private:
  void set_sizes(const AttentionArgs& args);
};
static_assert(std::has_unique_object_representations_v<AttentionKey>);

// Strides of a tensor of the call; 0 for the batch of thd.
AttentionStrides strides_of(const TensorView& t, AttentionFormat format);

struct AttentionKeyHash {
  size_t operator()(const AttentionKey& key) const;
};

// The pointers that a graph takes. The uid of a tensor in the graph is its number here plus one.
enum class AttentionSlot : int {
  Query,
  Key,
  Value,
  Out,
  Statistics,
  GradOut,
  GradQuery,
  GradKey,
  GradValue,
  Bias,
  GradBias,
  Sink,
  GradSink,
  Seed,
  Offset,
  QueryLengths,
  KeyLengths,  // int32 [batch]
  // int64 [batch + 1]: element at which each sequence of a packed tensor begins
  QueryOffsets,
  KeyOffsets,
  ValueOffsets,
  OutOffsets,
  StatisticsOffsets,
  GradQueryOffsets,
  GradKeyOffsets,
  GradValueOffsets,
  // fp32 [1], of FP8
  DescaleQuery,
  DescaleKey,
  DescaleValue,
  DescaleSoftmax,
  ScaleSoftmax,
  DescaleOut,
  ScaleOut,
  DescaleGradOut,
  DescaleGradProduct,
  ScaleGradProduct,
  ScaleGradQuery,
  ScaleGradKey,
  ScaleGradValue,
  AmaxSoftmax,
  AmaxOut,
  AmaxGradProduct,
  AmaxGradQuery,
  AmaxGradKey,
  AmaxGradValue,
  Count
};

using AttentionPointers = std::array<void*, static_cast<size_t>(AttentionSlot::Count)>;

inline void*& at(AttentionPointers& pointers, AttentionSlot slot) {
  return pointers[static_cast<size_t>(slot)];
}

}  // namespace te::cuda
