// The position of a token, which selects its row in the table of angles: the index of the token in
// its sequence, plus the start position of that sequence.
#pragma once

#include <cstdint>

#include "core/hd.h"

namespace te {

struct RopePositions {
  const int32_t* starts;      // [batch], start positions; null: all 0
  const int32_t* cu_seqlens;  // [batch + 1], bounds of packed sequences; null: not packed
  int64_t sequences;          // batch
  int64_t count;              // rows of the table of angles

  // `token` is the index in the sequence `batch`, or, if packed, the index among all tokens (then
  // `batch` is ignored). The result is clamped to the rows of the table.
  TE_HD int64_t of(int64_t token, int64_t batch) const {
    if (cu_seqlens) {
      batch = sequence_of(token);
      token -= cu_seqlens[batch];
    }
    if (starts) token += starts[batch];
    return token < 0 ? 0 : token < count ? token : count - 1;
  }

  // The sequence of a packed token, by binary search: the first one that ends after the token. An
  // empty sequence ends where it starts, so the search passes over it.
  TE_HD int64_t sequence_of(int64_t token) const {
    int64_t low = 0, high = sequences - 1;
    while (low < high) {
      const int64_t middle = (low + high) / 2;
      if (cu_seqlens[middle + 1] <= token) {
        low = middle + 1;
      } else {
        high = middle;
      }
    }
    return low;
  }
};

}  // namespace te
