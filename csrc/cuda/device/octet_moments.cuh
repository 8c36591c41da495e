// Moments of a stream of octets (eight neighbouring values), at seven instructions per element.
//
// Sums are taken in fp32 over a few dozen elements, and added up in fp64. They are sums of
// deviations from a pivot, which a warp takes from its first elements, so that variances stay
// accurate when the mean is large. Deviations are scaled by a power of two, so that their squares
// stay within the range of fp32 for |x| from 2^-72 to 2^30. The result tells whether this was
// accurate enough (is_exact); if not, the warp takes the sums again in fp64. NaN and infinities are
// counted only there.
//
// Minimum and maximum are found from the bits, two elements of 16 bits at a time. A float is a sign
// and a magnitude. Compared as signed integers, floats without a sign bit are in the order of their
// values and above all others, so the largest integer is the maximum. Compared as unsigned
// integers, floats with a sign bit are above all others in the order of their magnitudes, so the
// largest integer is the minimum. If all elements are negative, or none is, the other extreme is
// the one with the smallest magnitude.
#pragma once

#include "core/moments.h"
#include "cuda/device/merge_rows.cuh"
#include "cuda/device/vector.cuh"

namespace te::cuda {

template <class T>
class OctetExtremes {
  static constexpr bool kPacked = sizeof(T) == 2;  // two elements to a word
  static constexpr uint32_t kSigns = kPacked ? 0x80008000u : 0x80000000u;

 public:
  __device__ __forceinline__ static uint32_t magnitude(uint32_t word) { return word & ~kSigns; }

  __device__ __forceinline__ void add(uint32_t a, uint32_t b) {
    // Let m be the bits of |x|. Adding 0x7fff (fp32: 0x7fffffff) to m gives a negative integer, in
    // the order of m, unless m is 0: then it gives the largest integer. So the minimum belongs to
    // the smallest |x| that is not 0, and sign bits tell which elements are not 0.
    const uint32_t p = magnitude(a) + ~kSigns, q = magnitude(b) + ~kSigns;
    if constexpr (kPacked) {
      highest_ = __vimax3_s16x2(highest_, a, b);
      highest_unsigned_ = __vimax3_u16x2(highest_unsigned_, a, b);
      least_ = __vimin3_s16x2(least_, p, q);
      uint32_t signs;  // 0xff for each of the four that is not 0
      asm("prmt.b32 %0, %1, %2, 0xfdb9;" : "=r"(signs) : "r"(p), "r"(q));
      nonzeros_ = __dp4a(static_cast<int>(signs), -1, nonzeros_);
    } else {
      highest_ = static_cast<uint32_t>(
          __vimax3_s32(static_cast<int>(highest_), static_cast<int>(a), static_cast<int>(b)));
      highest_unsigned_ = __vimax3_u32(highest_unsigned_, a, b);
      least_ = static_cast<uint32_t>(
          __vimin3_s32(static_cast<int>(least_), static_cast<int>(p), static_cast<int>(q)));
      nonzeros_ += static_cast<int>((p >> 31) + (q >> 31));
    }
  }

  // Writes the results of all lanes into `sums`, which must hold the count of the warp.
  __device__ __forceinline__ void put_warp_into(MomentSums& sums) const {
    constexpr unsigned kAll = 0xffffffffu;
    const int high = __reduce_max_sync(kAll, signed_of(highest_, false));
    const int least = __reduce_min_sync(kAll, signed_of(least_, true));
    const uint32_t high_unsigned = __reduce_max_sync(kAll, unsigned_of(highest_unsigned_));
    const uint32_t magnitude = static_cast<uint32_t>(least + 1) & kMagnitude;
    sums.smallest = magnitude != 0 ? value_of(magnitude) : kInfinity;
    sums.nonzeros = __reduce_add_sync(kAll, nonzeros_);
    const double nearest = sums.nonzeros < sums.count ? 0 : sums.smallest;  // least |x|
    sums.max = high >= 0 ? value_of(static_cast<uint32_t>(high)) : -nearest;
    sums.min = high_unsigned > kMagnitude ? value_of(high_unsigned) : nearest;
  }

 private:
  static constexpr uint32_t kMagnitude = kPacked ? 0x7fffu : 0x7fffffffu;

  __device__ __forceinline__ static double value_of(uint32_t bits) {
    if constexpr (kPacked) {
      T value;
      value.bits = static_cast<uint16_t>(bits);
      return static_cast<float>(value);
    } else {
      return __uint_as_float(bits);
    }
  }
  // The lower or the higher of the word's two elements, compared as integers.
  __device__ __forceinline__ static int signed_of(uint32_t word, bool lower) {
    if constexpr (!kPacked) return static_cast<int>(word);
    const int a = static_cast<int16_t>(word & 0xffffu), b = static_cast<int16_t>(word >> 16);
    return lower ? min(a, b) : max(a, b);
  }
  __device__ __forceinline__ static uint32_t unsigned_of(uint32_t word) {
    if constexpr (!kPacked) return word;
    return max(word & 0xffffu, word >> 16);
  }

  uint32_t highest_ = kSigns, highest_unsigned_ = 0, least_ = ~kSigns;
  int nonzeros_ = 0;
};

// Whether the sums of a warp, taken in fp32, are accurate to seven digits: all are finite, the mean
// is not too far from the pivot for the variance, and there are elements of at least `too_small`.
// Squares of smaller elements may have underflowed.
__device__ __forceinline__ bool fp32_was_enough(const MomentSums& sums, double too_small) {
  constexpr double kFarOff = 8;  // limit of (mean - pivot)^2 / variance
  const double all = sums.first + sums.second + sums.sum_abs;  // NaN or infinite if one of them is
  const double amax = fmax(-sums.min, sums.max);
  return sums.count == 0 ||
         (all - all == 0 &&
          (1 + kFarOff) * sums.first * sums.first <= kFarOff * sums.second * sums.count &&
          (amax >= too_small || amax == 0));
}

// The moments that a thread gathers. Add up to kLongest octets, fold, and repeat; at the end call
// warp_sums.
template <class T>
class OctetMoments {
  static constexpr float kScale = 0x1p32f;
  static constexpr double kUnscale = 0x1p-32;

 public:
  static constexpr int kLongest = 4 / Octet<T>::kWords;  // octets between folds, at most

  // To be called before anything is added.
  __device__ __forceinline__ void set_pivot(float pivot) { offset_ = -pivot * kScale; }

  __device__ __forceinline__ void add(const Octet<T>& x) {
#pragma unroll
    for (int i = 0; i < 8; ++i) {
      const float value = x[i], deviation = fmaf(value, kScale, offset_);
      part_first_[i % 2] += deviation;
      part_second_[i % 2] = fmaf(deviation, deviation, part_second_[i % 2]);
      part_abs_[i % 2] += fabsf(value);
    }
#pragma unroll
    for (int i = 0; i < 4 * Octet<T>::kWords; i += 2) extremes_.add(x.word(i), x.word(i + 1));
    ++octets_;
  }

  __device__ __forceinline__ void fold() {
    first_ += static_cast<double>(part_first_[0] + part_first_[1]);
    second_ += static_cast<double>(part_second_[0] + part_second_[1]);
    abs_ += static_cast<double>(part_abs_[0] + part_abs_[1]);
#pragma unroll
    for (int i = 0; i < 2; ++i) part_first_[i] = part_second_[i] = part_abs_[i] = 0.0f;
  }

  // Returns the sums of the warp, with deviations taken from the pivot.
  __device__ __forceinline__ MomentSums warp_sums() const {
    MomentSums sums = MomentSums::empty();
    sums.count = 256.0 * octets_;
    sums.first = warp_add(first_) * kUnscale;
    sums.second = warp_add(second_) * (kUnscale * kUnscale);
    sums.sum_abs = warp_add(abs_);
    extremes_.put_warp_into(sums);
    return sums;
  }

  __device__ __forceinline__ static bool is_exact(const MomentSums& sums) {
    constexpr double kTooSmall = 0x1p-72;
    return fp32_was_enough(sums, kTooSmall);
  }

 private:
  float offset_ = 0;
  float part_first_[2] = {}, part_second_[2] = {}, part_abs_[2] = {};
  double first_ = 0, second_ = 0, abs_ = 0;
  OctetExtremes<T> extremes_;
  int octets_ = 0;
};

}  // namespace te::cuda
