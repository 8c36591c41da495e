// The keys that a query may attend to: a band around a diagonal of the score matrix (a sliding
// window). Causal attention is the band with right = 0 and an unlimited left side. Every kernel of
// this project that needs the range, on the CPU and on CUDA, calls `visible_keys`.
#pragma once

#include <cstdint>

#include "core/hd.h"

namespace te {

// Query i sees keys i + diagonal - left ... i + diagonal + right; a negative side is unlimited.
struct AttentionWindow {
  int64_t left = -1;
  int64_t right = -1;
  int64_t diagonal = 0;

  bool unlimited() const { return left < 0 && right < 0; }
};

// Keys first ... end - 1; first == end if there is none.
struct KeyRange {
  int64_t first;
  int64_t end;
};

TE_HD KeyRange visible_keys(const AttentionWindow& window, int64_t query, int64_t keys) {
  const int64_t center = query + window.diagonal;
  int64_t first = window.left < 0 ? 0 : center - window.left;
  int64_t end = window.right < 0 ? keys : center + window.right + 1;
  if (first < 0) first = 0;
  if (end > keys) end = keys;
  if (first >= end) first = end = 0;
  return {first, end};
}

}  // namespace te
