// merge_parts: what was computed in parts, each for a range of the same tokens, becomes one tensor.
// A row of `size` elements is the sum, in fp32 and rounded once, of what out holds there and of the
// parts that have its token, in this order.
//
// With log-sum-exps out and the parts are attention of the same queries with sets of keys that have
// no key in common, and out becomes attention with all these keys: each summand is multiplied by
// its share of the softmax,
//   share       = exp(its log_sum_exp) / sum of exp(log_sum_exp)
//   log_sum_exp = log of that sum
// An infinite log-sum-exp, of either sign, says that there is no key; what is written is +inf, as
// the backward of attention expects of queries that see none. What has no key, or a share of 0, is
// not looked at, NaN included; what alone has keys has a share of exactly 1.
//
// `fresh`: out and log_sum_exp are not read, as if they held zeros, and no key.
#pragma once

#include <vector>

#include "core/hd.h"
#include "core/tensor_view.h"

namespace te {

constexpr int kMostParts = 4;

struct MergePartsArgs {
  TensorView out;                 // [a, b, heads, size], the dtype of the parts or fp32
  TensorView log_sum_exp;         // fp32 [a, b, heads]; absent: the parts are summed
  std::vector<TensorView> parts;  // up to kMostParts, fp32/fp16/bf16, like out but for their tokens
  std::vector<TensorView> part_log_sum_exps;  // fp32, one for each part, or none
  std::vector<int64_t> begins;                // the token of out at which each part begins
  int token_axis;                             // 0 or 1: the axis of out whose places are tokens
  bool fresh;
  // All have any strides, but elements of a row lie side by side, and no two places of what is
  // written share memory.
};

void merge_parts(const MergePartsArgs& args, Stream stream);

// Where rows lie, counted in elements; an axis of one place has stride 0.
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
