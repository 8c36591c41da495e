// rope: rotary position embedding. The first `rotary_dim` elements of every head are rotated pair
// by pair; the rest passes through. A pair (a, b) is (i, i + rotary_dim / 2), or (2 i, 2 i + 1)
// interleaved:
//   y[a] = x[a] cos(f[a]) - x[b] sin(f[a])
//   y[b] = x[b] cos(f[b]) + x[a] sin(f[b])     f = freqs[position of the token]
// The backward is the transpose of this linear map. Computed in fp32 and rounded once. Angles must
// be below 2^50 (beyond that, neighbouring floats are millions of turns apart): for others, CUDA
// gives NaN.
#pragma once

#include "core/tensor_view.h"

namespace te {

struct RopeArgs {
  TensorView x;       // [sequence, batch, heads, size] or, with cu_seqlens, [tokens, heads, size];
                      // fp32/fp16/bf16, any strides whose last is 1
  TensorView freqs;   // fp32 [positions, rotary_dim], contiguous; rotary_dim is even and <= size
  TensorView starts;  // int32 [batch]: position of each sequence's first token; may be absent (0)
  TensorView cu_seqlens;     // int32 [batch + 1]: where each packed sequence ends; may be absent
  bool batch_first = false;  // x is [batch, sequence, heads, size]
  bool interleaved = false;
  bool backward = false;
  // Of every `period` heads the first `rotated` are rotated, and the others are copied (for query,
  // key and value in one tensor, for instance).
  int64_t period = 1, rotated = 1;
  TensorView out;  // shape and dtype of x, contiguous
};

// Positions outside of freqs read its first or last row. They can only come from the values of
// `starts` and `cu_seqlens`, which are on the device, so the host cannot check them.
void rope(const RopeArgs& args, Stream stream);

// The sizes and strides of a call, with x as [sequence, batch, heads, size].
struct RopeShape {
  int64_t sequence, batch, heads, size, rotary_dim, positions;
  int64_t x_sequence, x_batch, x_head;  // strides of x
  int64_t out_sequence, out_batch;      // strides of out, whose heads are contiguous
  explicit RopeShape(const RopeArgs& args);
};

namespace cpu {
void rope(const RopeArgs& args);
}
namespace cuda {
void rope(const RopeArgs& args, Stream stream);
}

}  // namespace te
