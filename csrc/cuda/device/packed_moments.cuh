// Moments of a stream of octets of 16-bit floats, at three instructions an element: nothing is
// unpacked.
//
// The tensor cores add up. Which element is where in their operands does not matter, as only totals
// do. The rows of a product with ones have sums of values or magnitudes; the diagonal of a product
// with the transpose has sums of squares.
//
// Products are exact. Their sums are of fp32, but cut off rather than rounded, so that they are
// kept short; and they are about zero, so that a warp whose mean is many deviations away, like one
// that has met NaN or squares outside of fp32 (is_exact), has to begin again (octet_moments.cuh).
#pragma once

#include "cuda/device/octet_moments.cuh"
#include "cuda/device/tensor_core.cuh"

namespace te::cuda {

// `Folded` is what sums go on in from fold to fold: fp32 will do for a few of them.
template <class T, class Folded = double>
class PackedMoments {
  static constexpr bool kHalf = std::is_same_v<T, Half>;
  static constexpr uint32_t kOnes = kHalf ? 0x3c003c00u : 0x3f803f80u;

 public:
  // So many octets may be added between folds. Squares of fp16 have 22 bits, more of which are cut
  // off.
  static constexpr int kLongest = kHalf ? 2 : 4;

  __device__ __forceinline__ void add(const Octet<T>& x) {
    uint32_t a[4];
#pragma unroll
    for (int i = 0; i < 4; ++i) a[i] = OctetExtremes<T>::magnitude(x.word(i));
    add_rows(plain_, x.word(0), x.word(1), x.word(2), x.word(3));
    add_rows(abs_rows_, a[0], a[1], a[2], a[3]);
    add_squares(squares_, a[0], a[1]);
    add_squares(squares_, a[2], a[3]);
    extremes_.add(x.word(0), x.word(1));
    extremes_.add(x.word(2), x.word(3));
    ++octets_;
  }

  // A lane has a row of the product, lane / 4, and two columns, 2 * (lane % 4) and the next. Which
  // of them is on the diagonal matters to the eight lanes that have such an element.
  __device__ __forceinline__ void fold() {
    const bool is_odd = threadIdx.x / 4 % 2 != 0;
    first_ += static_cast<Folded>(plain_[0] + plain_[2]);
    second_ += static_cast<Folded>(is_odd ? squares_[1] : squares_[0]);
    abs_ += static_cast<Folded>(abs_rows_[0] + abs_rows_[2]);
#pragma unroll
    for (int i = 0; i < 4; ++i) plain_[i] = abs_rows_[i] = squares_[i] = 0.0f;
  }

  // Of the warp, about zero.
  __device__ __forceinline__ MomentSums warp_sums() const {
    // Eight lanes hold them, one for each column: a lane takes the first sum of one of them, or the
    // second, or the third.
    const int lane = static_cast<int>(threadIdx.x) % 32, column = lane % 8;
    const int from = 4 * column + column / 2;
    const Folded first = __shfl_sync(kAll, first_, from);
    const Folded second = __shfl_sync(kAll, second_, from);
    const Folded abs = __shfl_sync(kAll, abs_, from);
    Folded sum = lane < 8 ? first : lane < 16 ? second : abs;
#pragma unroll
    for (int offset = 4; offset > 0; offset /= 2) sum += __shfl_xor_sync(kAll, sum, offset);
    MomentSums sums = MomentSums::empty();
    sums.count = 256.0 * octets_;
    sums.first = static_cast<double>(__shfl_sync(kAll, sum, 0));
    sums.second = static_cast<double>(__shfl_sync(kAll, sum, 8));
    sums.sum_abs = static_cast<double>(__shfl_sync(kAll, sum, 16));
    extremes_.put_warp_into(sums);
    return sums;
  }

  __device__ __forceinline__ static bool is_exact(const MomentSums& sums) {
    constexpr double kTooSmall = 0x1p-50;
    return fp32_was_enough(sums, kTooSmall);
  }

 private:
  static constexpr unsigned kAll = 0xffffffffu;

  // The product of a 16x16 matrix and ones: sums of its rows.
  __device__ __forceinline__ static void add_rows(float (&sums)[4], uint32_t a, uint32_t b,
                                                  uint32_t c, uint32_t d) {
    add_product<T>(sums, a, b, c, d, kOnes, kOnes);
  }
  // The product of an 8x16 matrix and its transpose, in the upper half of `sums`.
  __device__ __forceinline__ static void add_squares(float (&sums)[4], uint32_t left,
                                                     uint32_t right) {
    add_product<T>(sums, left, left, right, right, left, right);
  }
  float plain_[4] = {}, abs_rows_[4] = {}, squares_[4] = {};
  Folded first_ = 0, second_ = 0, abs_ = 0;
  OctetExtremes<T> extremes_;
  int octets_ = 0;
};

}  // namespace te::cuda
