// Fused attention on CUDA, through graphs of cuDNN:
//   out = dropout(softmax(scale * query key^T + bias)) value, over the keys that a query sees.
//   query [.., heads, size], key [.., groups, size], value [.., groups, value size]; query head h
//   belongs to group h / (heads / groups). A key must lie in the query's window, whose diagonal
//   runs from the first query and key (or with `bottom_right` to the last ones) of their sequence.
//   Sums and softmax are fp32. A query that sees no key, and a token outside every sequence, has a
//   result of zero and passes no gradient.
//
// In FP8, all operands of matrix products are rounded to FP8: query, key and value, the softmax
// result, and in the backward the gradients of the result and of the product of query and key.
//
// There is no CPU backend: the unfused path of the Python package defines the results.
#pragma once

#include <array>
#include <string>

#include "core/tensor_view.h"

namespace te {

// Order of the axes before heads and size. The numbers are part of the Python binding.
enum class AttentionFormat : int32_t {
  Sbhd = 0,  // sequence, batch
  Bshd = 1,  // batch, sequence
  Thd = 2,   // tokens: sequences of unequal length, one after the other
};

// The lengths and places of the sequences of queries, or of keys and values. Without `ends`, every
// sequence is as long as the tensor.
struct AttentionSequences {
  TensorView ends;    // int32 [batch + 1]: sequence b has ends[b + 1] - ends[b] tokens
  TensorView starts;  // int32 [batch + 1]: in thd, sequence b begins here; absent: at ends[b]
  // thd: upper bound of the lengths. Other formats: the tokens of the tensor if the call may share
  // the graph of similar sizes, else 0.
  int64_t longest = 0;
};

struct AttentionSettings {
  AttentionFormat format = AttentionFormat::Sbhd;
  int64_t left = -1, right = -1;  // window; negative: unlimited
  bool bottom_right = false;
  float scale = 1.0f;
  float dropout = 0.0f;  // probability
  bool alibi = false;    // the usual slopes; needs right = 0
  bool deterministic = false;
};

// The scales of FP8 attention, and the amaxes for the next scales. Absent in 16-bit attention. The
// forward has three scales: of query, key and value together, of the softmax result, and of the
// result. The backward has these three, then those of the gradients of the result, of the product
// of query and key, and of query, key and value together.
struct AttentionFp8 {
  static constexpr int kScales = 3, kAllScales = 6;   // in the forward, in the backward
  static constexpr int kAmaxes = 2, kGradAmaxes = 4;  // in the forward, in the backward
  // Of the softmax, cuDNN casts exp(score - largest score so far), which is not yet normalised. It
  // is at most 1, and each row has a 1, so the scale is the largest E4M3 value. A scale from the
  // amax of the normalised weights would be larger, and would saturate these values.
  static constexpr float kSoftmaxScale = 448.0f;

  // fp32 [1] each. If that of the softmax result is absent, it is kSoftmaxScale.
  std::array<TensorView, kAllScales> scales;
  // fp32 [1] each: amax = max(amax, amax of this call); may be absent. Forward: of the softmax
  // result and of the result. Backward: of the gradients of the product of query and key, of query,
  // of key and of value.
  std::array<TensorView, kGradAmaxes> amaxes;
  // fp32 [room()], written: a pair {1 / scale, scale} for each scale, then the amaxes of this call.
  TensorView pairs;

  static constexpr int scale_count(bool backward) { return backward ? kAllScales : kScales; }
  static constexpr int amax_count(bool backward) { return backward ? kGradAmaxes : kAmaxes; }
  static constexpr int64_t room(bool backward) {
    return 2 * scale_count(backward) + amax_count(backward);
  }
  explicit operator bool() const { return static_cast<bool>(pairs); }
};

struct AttentionArgs {
  TensorView query, key, value;  // fp16, bf16 or E4M3; the last axis contiguous
  AttentionSequences query_sequences, key_sequences;
  AttentionSettings settings;
  TensorView bias;        // [1 or batch, 1 or heads, queries, keys], contiguous
  TensorView sink;        // fp32 [heads]: the score of an additional key whose value is zero
  TensorView seed;        // int64 [2]: seed and offset of the dropout
  TensorView out;         // contiguous, format and dtype of query
  TensorView statistics;  // fp32, one for each query and head; absent: inference
  AttentionFp8 fp8;       // without bias, sink, dropout and sequences

  // Whether cuDNN gets the offset of each sequence (ragged tensors), and so skips tokens outside
  // the sequences. thd needs this; with a bias it is not possible.
  bool packed() const {
    const bool has_lengths = query_sequences.ends || query_sequences.longest > 0;
    return settings.format == AttentionFormat::Thd || (has_lengths && !bias);
  }
};

// The gradients that the backward reads and writes. Only those of bias and sink may be absent, and
// are then not computed. Those of query, key and value may have strides (the last axis is
// contiguous), and the others are contiguous. All of `out`, query, key and value have the dtype of
// query, or in FP8 all E4M3 or all E5M2.
struct AttentionGradients {
  TensorView out;                // read
  TensorView query, key, value;  // written
  TensorView bias;               // shape of the bias, dtype of query
  TensorView sink;               // fp32 [heads]
};

// The functions below are about the forward if `gradients` is null, else about the backward.

// Returns how many bytes of scratch memory a call needs. Builds the cuDNN graph of the call if
// there is none yet. Throws Kind::Unsupported with the reason if cuDNN refuses the call, and
// Kind::Runtime if a graph would have to be built while the stream is being captured.
int64_t attention_workspace_bytes(const AttentionArgs& args, const AttentionGradients* gradients,
                                  Stream stream);

// `workspace` has attention_workspace_bytes(); it may be absent if they are 0.
void attention(const AttentionArgs& args, const AttentionGradients* gradients,
               const TensorView& workspace, Stream stream);

namespace cuda {

// The number of cuDNN graphs that have been built in this process.
int64_t attention_graph_count();

// The reason why cuDNN refuses a call, or "" if it does not. Only sizes, strides, dtypes and
// devices of the views are read, so they need no memory.
std::string attention_refusal(const AttentionArgs& args, const AttentionGradients* gradients);

int64_t attention_workspace_bytes(const AttentionArgs& args, const AttentionGradients* gradients,
                                  Stream stream);
void attention(const AttentionArgs& args, const AttentionGradients* gradients,
               const TensorView& workspace, Stream stream);

}  // namespace cuda
}  // namespace te
