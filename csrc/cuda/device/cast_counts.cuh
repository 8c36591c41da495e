// Counts the elements that an FP8 cast has turned into zero (underflows) or clipped (overflows).
// Elements of 16 bits are compared as packed integers, two or four per instruction, at a cost of
// three instructions per element.
#pragma once

#include <limits>

#include "cuda/device/octet_moments.cuh"

namespace te::cuda {

template <class T>
class OctetCastCounts {
  using Extremes = OctetExtremes<T>;

 public:
  // Magnitudes above `limit` overflow.
  __device__ __forceinline__ explicit OctetCastCounts(float limit) : limit_(limit) {
    uint32_t largest = kInfinity;  // bits of the largest T that is not above the limit
    if (limit <= kLargestFloat) {
      if constexpr (std::is_same_v<T, Half>)
        largest = __half_as_ushort(__float2half_rz(limit));
      else
        largest = __float_as_uint(limit) >> 16;
    }
    minus_largest_ = minus(largest);
  }

  __device__ __forceinline__ void add(const Octet<T>& x, uint2 codes) {
    if constexpr (sizeof(T) == 2) {
      add_four(x.word(0), x.word(1), codes.x);
      add_four(x.word(2), x.word(3), codes.y);
    } else {
#pragma unroll
      for (int i = 0; i < 8; ++i) add(x[i], (i < 4 ? codes.x : codes.y) >> (8 * (i % 4)));
    }
  }
  // Adds one element. Its code is the low byte of `code`.
  __device__ __forceinline__ void add(float value, uint32_t code) {
    underflows_ += value != 0.0f && (code & 0x7fu) == 0 ? kUnderflow : 0;
    overflows_ += fabsf(value) > limit_;
  }

  // Adds the packed counters of overflows to the total. Must be called at least every 16000 octets,
  // before one of the 16-bit counters wraps around.
  __device__ __forceinline__ void fold() {
    overflows_ += (part_ & 0xffffu) + (part_ >> 16);
    part_ = 0;
  }

  __device__ __forceinline__ int underflows() const {
    return static_cast<int>(underflows_ / kUnderflow);
  }
  __device__ __forceinline__ int overflows() const { return static_cast<int>(overflows_); }

 private:
  static constexpr uint32_t kInfinity = std::is_same_v<T, Half> ? 0x7c00u : 0x7f80u;
  static constexpr float kLargestFloat = std::numeric_limits<float>::max();
  static constexpr uint32_t kUnderflow = 128;

  // The negated magnitude, in both halves of a word. Added to a pair of magnitudes, it gives a
  // positive number in each half whose magnitude is larger.
  __device__ __forceinline__ static constexpr uint32_t minus(uint32_t magnitude) {
    return (0x10000u - magnitude) % 0x10000u * 0x10001u;
  }
  // Returns 1 in each half whose magnitude is above the limit and not NaN: min(max(magnitude -
  // largest, 0), 1), minus the same with infinity in place of the largest, which is 1 for NaN only.
  __device__ __forceinline__ uint32_t above(uint32_t magnitudes) const {
    return __viaddmin_s16x2_relu(magnitudes, minus_largest_, 0x00010001u) -
           __viaddmin_s16x2_relu(magnitudes, minus(kInfinity), 0x00010001u);
  }
  __device__ __forceinline__ void add_four(uint32_t a, uint32_t b, uint32_t codes) {
    a = Extremes::magnitude(a);
    b = Extremes::magnitude(b);
    part_ += above(a) + above(b);
    // Adding 0x7fff to a 16-bit magnitude, or 0x7f to that of a code, sets the sign bit unless the
    // magnitude is 0.
    uint32_t nonzero;  // 0xff for each element that is not 0
    asm("prmt.b32 %0, %1, %2, 0xfdb9;"
        : "=r"(nonzero)
        : "r"(a + 0x7fff7fffu), "r"(b + 0x7fff7fffu));
    const uint32_t nonzero_codes = (codes & 0x7f7f7f7fu) + 0x7f7f7f7fu;
    underflows_ = __dp4a(nonzero & ~nonzero_codes & 0x80808080u, 0x01010101u, underflows_);
  }

  float limit_;
  uint32_t minus_largest_;
  uint32_t part_ = 0;        // overflows: two counters of 16 bits, one per half of a pair
  uint32_t underflows_ = 0;  // kUnderflow times their number
  uint32_t overflows_ = 0;
};

// Merges the counts and errors of a cast into a row of statistics.
__device__ __forceinline__ void add_cast(CastMoments& row, int64_t count, float scale_inverse,
                                         double underflows, double overflows,
                                         double squared_error) {
  if (count == 0) return;
  CastMoments all = CastMoments::empty();
  all.count = static_cast<double>(count);
  all.underflows = underflows;
  all.overflows = overflows;
  all.squared_error = squared_error;
  all.add_scale_inverse(static_cast<double>(scale_inverse));
  merge(row, all);
}

}  // namespace te::cuda
