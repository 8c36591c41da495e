// merge_parts: merges partial results, each for a range of the tokens of out, into out. A row of
// `size` elements becomes the sum of its old value and of the rows of all parts that have its
// token, in this order, in fp32 and rounded once.
//
// With log-sum-exps this merges attention (context parallelism): out and the parts are attention of
// the same queries over disjoint sets of keys, and out becomes attention over all these keys. Each
// summand is then multiplied by its share of the softmax,
//   share       = exp(its log_sum_exp) / sum of exp(log_sum_exp)
//   log_sum_exp = log of that sum
// An infinite log-sum-exp, of either sign, means that the query sees no key. If no set has a key,
// +inf is written, which the backward of attention expects of such queries. A summand without keys,
// or with a share of 0, is not read, so a NaN in it has no effect. The only summand with keys has a
// share of exactly 1.
//
// `fresh`: the old values of out and log_sum_exp are not read, as if out were zero and had no key.
#pragma once

#include <vector>

#include "core/hd.h"
#include "core/tensor_view.h"

namespace te {

constexpr int kMostParts = 4;

struct MergePartsArgs {
  TensorView out;                 // [a, b, heads, size], the dtype of the parts or fp32
  TensorView log_sum_exp;         // fp32 [a, b, heads]; absent: the parts are summed
  std::vector<TensorView> parts;  // 1 to kMostParts, fp32/fp16/bf16: out with fewer tokens
  std::vector<TensorView> part_log_sum_exps;  // fp32, one for each part, or none
  std::vector<int64_t> begins;                // the token of out at which each part begins
  int token_axis;                             // 0 or 1: the axis of out along which tokens are
  bool fresh;
  // All tensors may have any strides, but the elements of a row are contiguous, and no two elements
  // of out, or of log_sum_exp, share memory.
};

void merge_parts(const MergePartsArgs& args, Stream stream);

// The offset of each row of a tensor, in elements. An axis of size 1 has stride 0.
struct RowPlaces {
  int64_t a = 0, b = 0, head = 0;

  RowPlaces() = default;
  explicit RowPlaces(const TensorView& t) : a(stride(t, 0)), b(stride(t, 1)), head(stride(t, 2)) {}
  TE_HD int64_t at(int64_t i, int64_t j, int64_t h) const { return i * a + j * b + h * head; }

 private:
  static int64_t stride(const TensorView& t, int axis) {
    return t.size(axis) > 1 ? t.stride(axis) : 0;
  }
};

namespace cpu {
void merge_parts(const MergePartsArgs& args);
}
namespace cuda {
void merge_parts(const MergePartsArgs& args, Stream stream);
}

}  // namespace te
