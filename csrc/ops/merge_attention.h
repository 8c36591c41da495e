// merge_attention: attention of the same queries with two sets of keys that have no key in common
// becomes, in place, attention with all of these keys. For each row of `size` elements, in fp32:
//   share       = 1 / (1 + exp(log_sum_exp - part_log_sum_exp))
//   out         = lerp(out, part, share), rounded once
//   log_sum_exp = log(exp(log_sum_exp) + exp(part_log_sum_exp))
// A part without keys, of log-sum-exp -Inf, has share 0. Where the share is 0, out stays as it is;
// where it is 1, out becomes the part: what has no weight spoils nothing, NaN included.
#pragma once

#include "core/hd.h"
#include "core/tensor_view.h"

namespace te {

struct MergeAttentionArgs {
  TensorView out;               // [a, b, heads, size], the dtype of part or fp32, read and written
  TensorView log_sum_exp;       // fp32 [a, b, heads], read and written
  TensorView part;              // shape of out, fp32/fp16/bf16
  TensorView part_log_sum_exp;  // fp32 [a, b, heads]
  // All have any strides, but elements of a row lie side by side, and no two places of what is
  // written share memory.
};

void merge_attention(const MergeAttentionArgs& args, Stream stream);

// Where rows lie, counted in elements; an axis of one place has stride 0.
struct RowPlaces {
  int64_t a, b, head;

  explicit RowPlaces(const TensorView& t) : a(stride(t, 0)), b(stride(t, 1)), head(stride(t, 2)) {}
  TE_HD int64_t at(int64_t i, int64_t j, int64_t h) const { return i * a + j * b + h * head; }

 private:
  static int64_t stride(const TensorView& t, int axis) {
    return t.size(axis) > 1 ? t.stride(axis) : 0;
  }
};

namespace cpu {
void merge_attention(const MergeAttentionArgs& args);
}
namespace cuda {
void merge_attention(const MergeAttentionArgs& args, Stream stream);
}

}  // namespace te
