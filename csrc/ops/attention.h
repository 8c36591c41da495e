// Fused attention on CUDA, through graphs of cuDNN:
//   out = dropout(softmax(scale * query key^T + bias)) value, over the keys that a query sees.
//   query [.., heads, size], key [.., groups, size], value [.., groups, value size]; query head h
//   belongs to group h / (heads / groups). A key must lie in the query's window, whose diagonal
//   runs from the first query and key (or with `bottom_right` to the last ones) of their sequence.
//   Sums and softmax are fp32. A query that sees no key, and a token outside every sequence, has a
//   result of zero and passes no gradient.
//
// In FP8 what a product reads is rounded to FP8: query, key and value, the softmax result, and in
// the backward the gradients of the result and of the product of query and key.
//
// There is no CPU backend: the unfused path of the Python package is the definition.
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

// Where the sequences of queries, or of keys and values, are. Absent: whole sequences.
struct AttentionSequences {
  TensorView ends;      // int32 [batch + 1]: sequence b has ends[b + 1] - ends[b] tokens
  TensorView starts;    // int32 [batch + 1]: where it begins in thd, if not at ends[b]
  int64_t longest = 0;  // thd: no sequence is longer
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

// Scales of FP8, and amaxes for the next ones. Absent: 16 bit. In the forward they are those of the
// inputs, of the softmax result and of the result; in the backward, these and then those of the
// gradients of the result, of the product of query and key, and of the inputs.
struct AttentionFp8 {
  static constexpr int kScales = 3, kAllScales = 6;   // in the forward, in the backward
  static constexpr int kAmaxes = 2, kGradAmaxes = 4;  // likewise
  // cuDNN casts exp(score - largest score so far), which is at most 1, and 1 in every row. The
  // scale of the largest weight would saturate it.
  static constexpr float kSoftmaxScale = 448.0f;

  // fp32 [1] each. That of the softmax result may be absent: kSoftmaxScale.
  std::array<TensorView, kAllScales> scales;
  // fp32 [1] each, raised, or absent. Forward: of the softmax result, of the result. Backward: of
  // the gradients of the product, of query, of key and of value.
  std::array<TensorView, kGradAmaxes> amaxes;
  // fp32, written: a pair {1 / scale, scale} for each scale, then the amaxes of this call.
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
  TensorView sink;        // fp32 [heads]: the score of one more key that has no value
  TensorView seed;        // int64 [2]: seed and offset of the dropout
  TensorView out;         // contiguous, format and dtype of query
  TensorView statistics;  // fp32, one for each query and head; absent: inference
  AttentionFp8 fp8;       // without bias, sink, dropout and sequences

  // Whether cuDNN is told where each sequence begins, and so skips what lies outside: of thd it
  // must be, with a bias it cannot be.
  bool packed() const {
    return settings.format == AttentionFormat::Thd || (query_sequences.ends && !bias);
  }
};

// What the backward reads and writes besides; all contiguous, those absent are not computed. Of the
// dtype of query, but with FP8 all of E4M3 or all of E5M2.
struct AttentionGradients {
  TensorView out;                // read
  TensorView query, key, value;  // written
  TensorView bias;               // shape of the bias, dtype of query
  TensorView sink;               // fp32 [heads]
};

// All entries: the forward where `gradients` is null, else the backward.

// Scratch memory that a call needs; builds the graph of the call where there is none yet. Throws
// Kind::Unsupported with the reason where cuDNN refuses, and Kind::Runtime where a graph would have
// to be built while the stream is captured.
int64_t attention_workspace_bytes(const AttentionArgs& args, const AttentionGradients* gradients,
                                  Stream stream);

// `workspace`: that many bytes; may be absent where there are none.
void attention(const AttentionArgs& args, const AttentionGradients* gradients,
               const TensorView& workspace, Stream stream);

namespace cuda {

// Graphs built so far.
int64_t attention_graph_count();

// Why cuDNN does not take a problem, "" where it does; only sizes, strides, dtypes and devices of
// the views are looked at.
std::string attention_refusal(const AttentionArgs& args, const AttentionGradients* gradients);

int64_t attention_workspace_bytes(const AttentionArgs& args, const AttentionGradients* gradients,
                                  Stream stream);
void attention(const AttentionArgs& args, const AttentionGradients* gradients,
               const TensorView& workspace, Stream stream);

}  // namespace cuda
}  // namespace te
