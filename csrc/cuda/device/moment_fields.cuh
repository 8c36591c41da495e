// MomentSums as a list of fields (merge_rows.cuh), to be merged over warps, blocks and groups of
// blocks: first the fields that are summed, then those of which the minimum is taken. The count of
// elements is not in the list, because whoever reads it knows the count.
#pragma once

#include "core/moments.h"

namespace te::cuda {

constexpr int kMomentFields = 9, kMomentFieldsThatAdd = 6;

struct MomentFields {
  double at[kMomentFields];

  __device__ __forceinline__ explicit MomentFields(const MomentSums& s)
      : at{s.first, s.second, s.sum_abs, s.nonzeros, s.nans, s.infs, s.min, -s.max, s.smallest} {}
};

__device__ __forceinline__ MomentSums sums_from(const double* fields, double count) {
  return {count,      fields[0], fields[1], fields[2], fields[6],
          -fields[7], fields[8], fields[3], fields[4], fields[5]};
}

}  // namespace te::cuda
