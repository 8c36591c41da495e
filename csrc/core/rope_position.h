// The position of a token: where it stands in its sequence, plus where that sequence starts.
#pragma once

#include <cstdint>

#include "core/hd.h"

namespace te {

struct RopePositions {
  const int32_t* starts;      // [batch]; null: 0
  const int32_t* cu_seqlens;  // [batch + 1] of packed sequences; null: tokens know their sequence
  int64_t sequences;          // batch
  int64_t count;              // rows of the table of angles

  // `token` counts from the start of the sequence `batch`, or over all packed tokens.
  TE_HD int64_t of(int64_t token, int64_t batch) const {
    if (cu_seqlens) {
      batch = sequence_of(token);
      token -= cu_seqlens[batch];
    }
    if (starts) token += starts[batch];
    return token < 0 ? 0 : token < count ? token : count - 1;
  }

  // The last sequence that starts at or before the token; empty ones end where they start.
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
