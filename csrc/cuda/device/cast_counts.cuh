// How many elements an FP8 cast has made zero, or had to cut off, of octets of 16-bit floats beside
// their codes: two or four at a time, at three instructions an element. NaN counts as cut off.
#pragma once

#include "cuda/device/octet_moments.cuh"

namespace te::cuda {

template <class T>
class OctetCastCounts {
  using Extremes = OctetExtremes<T>;

 public:
  // Above `limit`, magnitudes are cut off.
  __device__ __forceinline__ explicit OctetCastCounts(float limit) {
    uint32_t largest = 0x7fffu;  // bits of the largest magnitude that is not above
    if constexpr (std::is_same_v<T, Half>) {
      if (limit == limit) largest = __half_as_ushort(__float2half_rz(limit));
    } else {
      if (limit == limit) largest = __float_as_uint(limit) >> 16;
    }
    below_ = (0x10000u - largest) % 0x10000u * 0x10001u;
  }

  __device__ __forceinline__ void add(const Octet<T>& x, uint2 codes) {
    add(x.word(0), x.word(1), codes.x);
    add(x.word(2), x.word(3), codes.y);
  }

  // To be called after some thousand octets at the latest.
  __device__ __forceinline__ void fold() {
    overflows_ += (part_ & 0xffffu) + (part_ >> 16);
    part_ = 0;
  }

  __device__ __forceinline__ int underflows() const { return static_cast<int>(underflows_ >> 7); }
  __device__ __forceinline__ int overflows() const { return static_cast<int>(overflows_); }

 private:
  __device__ __forceinline__ void add(uint32_t a, uint32_t b, uint32_t codes) {
    a = Extremes::magnitude(a);
    b = Extremes::magnitude(b);
    part_ += __viaddmin_s16x2_relu(a, below_, 0x00010001u) +
             __viaddmin_s16x2_relu(b, below_, 0x00010001u);
    // Sums whose sign tells what is not zero, of 16 bits and of 8.
    uint32_t nonzero;  // a byte of ones for each such element
    asm("prmt.b32 %0, %1, %2, 0xfdb9;"
        : "=r"(nonzero)
        : "r"(a + 0x7fff7fffu), "r"(b + 0x7fff7fffu));
    const uint32_t nonzero_codes = (codes & 0x7f7f7f7fu) + 0x7f7f7f7fu;
    underflows_ = __dp4a(nonzero & ~nonzero_codes & 0x80808080u, 0x01010101u, underflows_);
  }

  uint32_t below_;           // minus the limit, twice
  uint32_t part_ = 0;        // overflows, twice
  uint32_t underflows_ = 0;  // 128 for each
  uint32_t overflows_ = 0;
};

}  // namespace te::cuda
