// Moments of a stream of octets of 16-bit floats, at three instructions per element: nothing is
// unpacked.
//
// Tensor cores compute the sums. It does not matter where an element is in their operands, because
// only totals are needed. A product with a matrix of ones has the sums of its rows, of values or of
// magnitudes; a product with the transpose has sums of squares on its diagonal.
//
// The products of elements are exact. They are summed in fp32, but truncated rather than rounded,
// so only few are summed before each fold. The pivot is zero. So if the mean of a warp is many
// standard deviations from zero, or the warp has met NaN or squares outside the range of fp32,
// is_exact is false, and the moments have to be taken in another way (octet_moments.cuh, or in
// fp64).
#pragma once

#include "cuda/device/octet_moments.cuh"
#include "cuda/device/tensor_core.cuh"

namespace te::cuda {

// `Folded`: the type in which the sums of all folds are added up. For a few folds fp32 is enough.
template <class T, class Folded = double>
class PackedMoments {
  static constexpr bool kHalf = std::is_same_v<T, Half>;
  static constexpr uint32_t kOnes = kHalf ? 0x3c003c00u : 0x3f803f80u;

 public:
  // The number of octets that may be added between folds. Squares of fp16 have 22 bits, so that
  // truncation loses more of them.
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

  // Adds the products to the totals of the lane. A lane has two neighbouring columns of the
  // product, the first of which is 2 * (lane % 4), in rows lane / 4 and lane / 4 + 8. Eight lanes
  // have an element of the diagonal, in their first or second column; of the others, `second_` is
  // not used.
  __device__ __forceinline__ void fold() {
    const bool is_odd = threadIdx.x / 4 % 2 != 0;
    first_ += static_cast<Folded>(plain_[0] + plain_[2]);
    second_ += static_cast<Folded>(is_odd ? squares_[1] : squares_[0]);
    abs_ += static_cast<Folded>(abs_rows_[0] + abs_rows_[2]);
#pragma unroll
    for (int i = 0; i < 4; ++i) plain_[i] = abs_rows_[i] = squares_[i] = 0.0f;
  }

  // Returns the sums of the warp, with a pivot of zero.
  __device__ __forceinline__ MomentSums warp_sums() const {
    // The eight lanes with an element of the diagonal hold the totals. Here lanes 0 to 7 take
    // `first_` from them, the next eight `second_` and the others `abs_`, so that one tree of
    // shuffles adds up all three.
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
