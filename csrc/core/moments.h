// Moments: the sums and extremes from which the statistics of a tensor are computed. Moments of two
// parts of a tensor merge into those of the whole, so threads, blocks, micro-batches and ranks can
// compute them separately. The rows below are plain float64; Python has the same fields in the same
// order (transformer_engine/pytorch/kernels/moments.py).
//
// An element that is NaN is counted, and makes mean, sums, min, max and amax NaN; infinities are
// counted and propagate as they do in any sum.
#pragma once

#include <cmath>
#include <limits>

#include "core/hd.h"

namespace te {

inline constexpr double kInfinity = std::numeric_limits<double>::infinity();
inline constexpr double kNaN = std::numeric_limits<double>::quiet_NaN();

struct Moments {
  double count;
  double mean;
  double m2;  // sum of squared deviations from the mean
  double sum_abs;
  double sum_squares;
  double min, max, amax;
  double smallest;  // the smallest non-zero |x|; +inf if there is none
  double nonzeros, nans, infs;
  double reserved[4];

  TE_HD static Moments empty() {
    return {0, 0, 0, 0, 0, kInfinity, -kInfinity, 0, kInfinity, 0, 0, 0, {0, 0, 0, 0}};
  }
};
inline constexpr int kMomentsFields = 16;
static_assert(sizeof(Moments) == kMomentsFields * sizeof(double));

// The largest |x| that FP8 represents with this scale. If the scale was computed from the amax of
// the same tensor, three roundings lie between the amax and the product here. The tolerance of
// 2^-22 covers them, so that the element with the amax does not count as an overflow.
TE_HD constexpr float overflow_limit(float fp8_max, float scale_inverse) {
  constexpr float kRoundings = 1.0f + 0x1p-22f;
  return fp8_max * scale_inverse * kRoundings;
}

// The errors that a cast to FP8 has made in the elements of a tensor.
struct CastMoments {
  double count;
  double underflows;     // x != 0 and its code is a zero
  double overflows;      // |x| > overflow_limit(fp8_max, scale_inv)
  double squared_error;  // sum of (x - dequantised)^2
  double min_scale_inv, max_scale_inv;
  double reserved[2];

  TE_HD static CastMoments empty() { return {0, 0, 0, 0, kInfinity, 0, {0, 0}}; }

  TE_HD void add_scale_inverse(double value) {
    if (value != 0 && !(min_scale_inv < value)) min_scale_inv = value;
    if (!(max_scale_inv > value)) max_scale_inv = value;
  }
};
inline constexpr int kCastMomentsFields = 8;
static_assert(sizeof(CastMoments) == kCastMomentsFields * sizeof(double));

// Statistics over the blocks (of block scaling) of a tensor.
struct BlockMoments {
  double count;          // elements
  double largest_range;  // the largest dynamic range of a block
};

// The smaller and the larger of two numbers; NaN if either is NaN.
TE_HD double smaller(double a, double b) { return a < b || a != a ? a : b; }
TE_HD double larger(double a, double b) { return a > b || a != a ? a : b; }

// Chan's formula, in the form that keeps an infinite mean infinite.
TE_HD void merge(Moments& into, const Moments& from) {
  if (from.count == 0) return;
  const double count = into.count + from.count;
  const double share = into.count / count, from_share = from.count / count;
  const double apart = from.mean - into.mean;
  into.m2 += from.m2 + apart * apart * into.count * from_share;
  into.mean = into.mean * share + from.mean * from_share;
  into.count = count;
  into.sum_abs += from.sum_abs;
  into.sum_squares += from.sum_squares;
  into.min = smaller(into.min, from.min);
  into.max = larger(into.max, from.max);
  into.amax = larger(into.amax, from.amax);
  into.smallest = smaller(into.smallest, from.smallest);
  into.nonzeros += from.nonzeros;
  into.nans += from.nans;
  into.infs += from.infs;
}

TE_HD void merge(CastMoments& into, const CastMoments& from) {
  into.count += from.count;
  into.underflows += from.underflows;
  into.overflows += from.overflows;
  into.squared_error += from.squared_error;
  into.min_scale_inv = smaller(into.min_scale_inv, from.min_scale_inv);
  into.max_scale_inv = larger(into.max_scale_inv, from.max_scale_inv);
}

TE_HD void merge(BlockMoments& into, const BlockMoments& from) {
  into.count += from.count;
  into.largest_range = larger(into.largest_range, from.largest_range);
}

// The kind of a row, for rows whose kind is known only at run time. Such a row has kRowFields
// doubles, which is enough for every kind. Python has the same numbers
// (transformer_engine/debug/statistics/rows.py).
enum class RowKind : int64_t { Moments = 0, Casts = 1, Blocks = 2 };
inline constexpr int kRowKinds = 3;
inline constexpr int kRowFields = kMomentsFields;

TE_HD void merge(RowKind kind, double* into, const double* from) {
  const auto merge_as = [&]<class Row>(Row* row) {
    merge(*row, *reinterpret_cast<const Row*>(from));
  };
  switch (kind) {
    case RowKind::Moments: return merge_as(reinterpret_cast<Moments*>(into));
    case RowKind::Casts: return merge_as(reinterpret_cast<CastMoments*>(into));
    case RowKind::Blocks: return merge_as(reinterpret_cast<BlockMoments*>(into));
  }
}

// A pivot for MomentSums, from a mean or an element: 0 if that is infinite or NaN.
TE_HD double pivot_from(double value) { return value - value == 0 ? value : 0; }

// Sums from which Moments are computed at the end: the mean and m2 are replaced by sums of the
// deviations from a pivot near the mean. Two MomentSums with the same pivot are merged by
// additions, without the divisions of Chan's formula. In fp64 no digit that matters is lost,
// however far the pivot is from the mean.
struct MomentSums {
  double count, first, second;  // of x - pivot and its square
  double sum_abs;
  double min, max, smallest;  // of elements that are not NaN
  double nonzeros, nans, infs;

  TE_HD static MomentSums empty() {
    return {0, 0, 0, 0, kInfinity, -kInfinity, kInfinity, 0, 0, 0};
  }

  // Changes the sums to those for a pivot that is lower by `by`.
  TE_HD void shift(double by) {
    second += by * (2 * first + count * by);
    first += count * by;
  }

  TE_HD void add(double x, double pivot) {
    const double deviation = x - pivot, magnitude = x < 0 ? -x : x;
    count += 1;
    first += deviation;
    second += deviation * deviation;
    sum_abs += magnitude;
    if (x < min) min = x;
    if (x > max) max = x;
    if (x != 0 && magnitude < smallest) smallest = magnitude;
    nonzeros += x != 0 ? 1 : 0;
    nans += x != x ? 1 : 0;
    infs += magnitude == kInfinity ? 1 : 0;
  }

  TE_HD void add(const MomentSums& other) {
    count += other.count;
    first += other.first;
    second += other.second;
    sum_abs += other.sum_abs;
    if (other.min < min) min = other.min;
    if (other.max > max) max = other.max;
    if (other.smallest < smallest) smallest = other.smallest;
    nonzeros += other.nonzeros;
    nans += other.nans;
    infs += other.infs;
  }

  // The moments, from sums that were taken with this pivot.
  TE_HD Moments about(double pivot) const {
    Moments m = Moments::empty();
    if (count == 0) return m;
    const double shift = first / count;
    m.count = count;
    m.mean = pivot + shift;
    m.m2 = second - first * shift;
    if (m.m2 < 0) m.m2 = 0;
    m.sum_abs = sum_abs;
    m.sum_squares = nans > 0 ? kNaN : infs > 0 ? kInfinity : m.m2 + count * m.mean * m.mean;
    m.min = nans > 0 ? kNaN : min + 0.0;  // turns -0 into 0, for logs
    m.max = nans > 0 ? kNaN : max + 0.0;
    m.amax = larger(-m.min, m.max);
    m.smallest = smallest;
    m.nonzeros = nonzeros;
    m.nans = nans;
    m.infs = infs;
    return m;
  }
};

// The statistics that are logged, computed from a row. NaN where one is undefined.
struct Statistics {
  double min, max, mean, std;  // std: unbiased
  double l1_norm, l2_norm, cur_amax;
  double dynamic_range;  // log2 of the largest over the smallest non-zero magnitude
};

inline Statistics statistics_of(const Moments& m) {
  if (m.count == 0) return {kNaN, kNaN, kNaN, kNaN, 0, 0, 0, kNaN};
  return {.min = m.min,
          .max = m.max,
          .mean = m.mean,
          .std = std::sqrt(m.m2 / (m.count - 1)),
          .l1_norm = m.sum_abs,
          .l2_norm = std::sqrt(m.sum_squares),
          .cur_amax = m.amax,
          .dynamic_range = m.amax == 0 ? kNaN : std::log2(m.amax) - std::log2(m.smallest)};
}

struct CastStatistics {
  double underflows_percent, overflows_percent, mse;
  double min_scale_inv, max_scale_inv;
};

inline CastStatistics statistics_of(const CastMoments& m) {
  if (m.count == 0) return {kNaN, kNaN, kNaN, kNaN, kNaN};
  return {100 * m.underflows / m.count, 100 * m.overflows / m.count, m.squared_error / m.count,
          m.min_scale_inv, m.max_scale_inv};
}

}  // namespace te
