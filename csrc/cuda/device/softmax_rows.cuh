// Which row of scores a warp or block of a softmax kernel takes, and which keys the query of that
// row sees.
#pragma once

#include "core/attention_window.h"
#include "cuda/device/divide.cuh"
#include "cuda/device/vector.cuh"
#include "cuda/policy/softmax.h"
#include "ops/softmax.h"

namespace te::cuda {

struct SoftmaxMask {
  const uint8_t* hidden = nullptr;  // non-zero: the key is hidden; null: none is
  int64_t batch_stride = 0, head_stride = 0, query_stride = 0;
  int step = 0;       // between keys: 1, or 0 where one value stands for all keys
  bool wide = false;  // a pack of keys is one aligned access
};

struct SoftmaxGeometry {
  int64_t rows, heads, queries;
  int keys;
  // Consecutive warps and blocks take the same query in all heads, so that a mask which the heads
  // share is read from memory once. Otherwise they take the queries of one head.
  bool heads_first = false;
  AttentionWindow window;
  bool windowed = false;
  SoftmaxMask mask;
};

// Keys first ... end - 1 of a row. The number of a key fits 32 bits (softmax.cu checks it), which
// keeps the comparisons of each pack cheap.
struct Span {
  int first, end;
};

struct SoftmaxRow {
  int64_t index;
  Span seen;
  const uint8_t* hidden;
};

__device__ __forceinline__ int64_t row_number() {
  return static_cast<int64_t>(blockIdx.x) * blockDim.y + threadIdx.y;
}

__device__ __forceinline__ SoftmaxRow row_of(const SoftmaxGeometry& g) {
  if (g.mask.hidden == nullptr && !g.windowed) return {row_number(), {0, g.keys}, nullptr};
  const Quotient outer = divide_by(row_number(), g.heads_first ? g.heads : g.queries);
  int64_t query = outer.remainder, matrix = outer.quotient;
  if (g.heads_first) {
    const Quotient inner = divide_by(outer.quotient, g.queries);
    query = inner.remainder;
    matrix = inner.quotient * g.heads + outer.remainder;
  }
  const KeyRange seen = visible_keys(g.window, query, g.keys);
  SoftmaxRow row{matrix * g.queries + query,
                 {static_cast<int>(seen.first), static_cast<int>(seen.end)},
                 nullptr};
  if (g.mask.hidden != nullptr) {
    const Quotient batch = divide_by(matrix, g.heads);
    row.hidden = g.mask.hidden + batch.quotient * g.mask.batch_stride +
                 batch.remainder * g.mask.head_stride + query * g.mask.query_stride;
  }
  return row;
}

// The mask bytes of V keys. They stay packed in words until they are used: to unpack bytes, the
// thread would have to wait for each load at once.
template <int V>
struct HiddenKeys {
  uint32_t words[(V + 3) / 4];

  __device__ __forceinline__ bool operator[](int k) const {
    return (words[k / 4] & (0xffu << (k % 4 * 8))) != 0;
  }
};

template <int V>
__device__ __forceinline__ HiddenKeys<V> load_hidden(const SoftmaxMask& mask, const uint8_t* hidden,
                                                     int column) {
  HiddenKeys<V> pack{};
  if (mask.wide) {
    const uint8_t* from = hidden + column;
    if constexpr (V == 8) {
      const uint2 words = __ldg(reinterpret_cast<const uint2*>(from));
      pack.words[0] = words.x;
      pack.words[1] = words.y;
    } else if constexpr (V == 4) {
      pack.words[0] = __ldg(reinterpret_cast<const uint32_t*>(from));
    } else {
      pack.words[0] = __ldg(from);
    }
    return pack;
  }
#pragma unroll
  for (int k = 0; k < V; ++k)
    pack.words[k / 4] |= static_cast<uint32_t>(__ldg(hidden + (column + k) * mask.step))
                         << (k % 4 * 8);
  return pack;
}

inline SoftmaxMask mask_of(const TensorView& t, int64_t elements_per_access) {
  if (!t) return {};
  SoftmaxMask mask{t.ptr<uint8_t>(), t.stride(0), t.stride(1), t.stride(2),
                   static_cast<int>(t.stride(3))};
  if (t.size(3) == 1) mask.step = 0;
  mask.wide = mask.step == 1 && is_aligned(t.data, static_cast<size_t>(elements_per_access));
  for (int axis = 0; axis < 3; ++axis)
    mask.wide &= t.size(axis) == 1 || t.stride(axis) % elements_per_access == 0;
  return mask;
}

inline SoftmaxGeometry geometry_of(const SoftmaxForwardArgs& args, int elements_per_access) {
  const TensorView& x = args.x;
  SoftmaxGeometry g{.rows = x.rows(),
                    .heads = x.size(1),
                    .queries = x.size(2),
                    .keys = static_cast<int>(x.size(3)),
                    .window = args.window,
                    .windowed = !args.window.unlimited(),
                    .mask = mask_of(args.mask, elements_per_access)};
  g.heads_first = args.mask && args.mask.stride(1) == 0;
  return g;
}

}  // namespace te::cuda
