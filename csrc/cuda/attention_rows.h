// Sequences of unequal length: writes the lengths and offsets that cuDNN needs, and clears the rows
// of its results that it leaves undefined.
#pragma once

#include <cuda_runtime.h>

#include "ops/attention.h"

namespace te::cuda {

constexpr int kMostOffsets = 8;

// What write_offsets writes: the length of each sequence, and the element at which it begins.
// Sequences from `real` to `batch` only fill up the batch: they are empty and begin at the end of
// the last real one.
struct AttentionOffsets {
  struct Ends {
    const int32_t* ends;    // cumulative lengths; null: all are `whole`
    const int32_t* starts;  // where each begins; null: as in `ends`
    int32_t* lengths;       // [batch], written
    int32_t whole;
  };
  struct Offsets {
    int64_t* at;     // [batch + 1], written
    int64_t stride;  // elements from one token to the next, or from one sequence to the next
    bool is_key;
  };
  Ends query, key;
  bool evenly = false;  // sequence b begins at b * stride, whatever its tokens
  int64_t real = 0, batch = 0;
  Offsets offsets[kMostOffsets];
  int count = 0;
};

void write_offsets(const AttentionOffsets& offsets, cudaStream_t stream);

// What clear_rows writes: zeros to the rows of tokens outside every sequence, and of queries that
// see no key. The statistics of all these rows become +Inf, so that the backward gives every key
// the weight exp(-Inf) = 0 there.
struct AttentionRows {
  TensorView rows[3];  // in the call's format; rows have one stride over sequences and tokens
  bool is_key[3] = {};
  int count = 0;
  TensorView statistics;  // may be absent
  bool packed = false;    // statistics are [token, head], not [sequence, head, token]
};

void clear_rows(const AttentionArgs& args, const AttentionRows& rows, cudaStream_t stream);

}  // namespace te::cuda
