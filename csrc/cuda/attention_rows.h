// Sequences of unequal length: what cuDNN must be told of them, and what it leaves undone.
#pragma once

#include <cuda_runtime.h>

#include "ops/attention.h"

namespace te::cuda {

constexpr int kMostOffsets = 8;

// Fills lengths, and the element at which each sequence begins. Sequences from `real` to `batch`
// are empty, at the end of the last real one.
struct AttentionOffsets {
  struct Ends {
    const int32_t* ends;    // null: all sequences are whole
    const int32_t* starts;  // null: as ends
    int32_t* lengths;       // [batch], written
    int32_t whole;
  };
  struct Offsets {
    int64_t* at;     // [batch + 1], written
    int64_t stride;  // elements from one token to the next, or from one sequence to the next
    bool is_key;
  };
  Ends query, key;
  bool evenly = false;  // sequences begin at multiples of the stride, not at their tokens
  int64_t real = 0, batch = 0;
  Offsets offsets[kMostOffsets];
  int count = 0;
};

void write_offsets(const AttentionOffsets& offsets, cudaStream_t stream);

// Zeroes rows of tokens outside every sequence, and of queries that see no key; their statistics
// become +Inf, so that the backward gives every key the weight exp(-Inf) = 0 there.
struct AttentionRows {
  TensorView rows[3];  // in the call's format; sequences and tokens have one stride, that of rows
  bool is_key[3] = {};
  int count = 0;
  TensorView statistics;  // may be absent
  bool packed = false;    // the statistics of a token's heads are together
};

void clear_rows(const AttentionArgs& args, const AttentionRows& rows, cudaStream_t stream);

}  // namespace te::cuda
