// Compares the FP8 and 16-bit conversions with two references: the definition of the formats in
// double precision, and NVIDIA's own conversions if CUDA's headers are installed.
#include "core/float8.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <limits>
#include <vector>

#include "core/float16.h"

#if __has_include(<cuda_fp8.h>)
#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_fp8.h>
#define TE_HAS_CUDA_TYPES 1
#else
#define TE_HAS_CUDA_TYPES 0
#endif

namespace te {
namespace {

constexpr float kInfinity = std::numeric_limits<float>::infinity();
constexpr float kQuietNaN = std::numeric_limits<float>::quiet_NaN();

// A binary floating-point format by its definition, in double precision.
struct Format {
  int mantissa_bits, bias;
  uint32_t largest;  // code of the largest finite value
  bool saturates;    // false: values that round above the largest become `largest + 1`, infinity

  double value(uint32_t code) const {
    const auto exponent = static_cast<int>(code >> mantissa_bits);
    const double fraction = std::ldexp(code & ((1u << mantissa_bits) - 1u), -mantissa_bits);
    return exponent == 0 ? std::ldexp(fraction, 1 - bias)
                         : std::ldexp(1.0 + fraction, exponent - bias);
  }
};
constexpr Format kE4M3{3, 7, 0x7e, true}, kE5M2{2, 15, 0x7b, true}, kHalf{10, 15, 0x7bff, false};
constexpr Format kBFloat16{7, 127, 0x7f7f, false};

// Rounds magnitudes to the nearest code, ties to the even one.
class Nearest {
 public:
  explicit Nearest(const Format& format) : format_(format) {
    for (uint32_t code = 0; code <= format.largest; ++code) values_.push_back(format.value(code));
  }
  uint32_t operator()(double magnitude) const {
    const double top = format_.value(format_.largest);
    const double above = 2 * top - format_.value(format_.largest - 1);  // the next value, if any
    if (magnitude >= top) {
      const bool rounds_up = magnitude >= (top + above) / 2;
      return format_.largest + (rounds_up && !format_.saturates ? 1 : 0);
    }
    const auto upper = std::upper_bound(values_.begin(), values_.end(), magnitude);
    const auto code = static_cast<uint32_t>(upper - values_.begin()) - 1;
    const double middle = (values_[code] + values_[code + 1]) / 2;
    if (magnitude == middle) return code + (code & 1u);
    return code + (magnitude > middle ? 1 : 0);
  }

 private:
  Format format_;
  std::vector<double> values_;
};

// Calls f(x) for positive values of every exponent, and for the values next to each code and to
// each midpoint between two codes, where rounding changes. The caller adds the sign.
template <class F>
void for_each_magnitude(const Format& format, F&& f) {
  constexpr uint32_t kInfinityPattern = 0x7f800000u, kStride = 509, kAround = 3;
  for (uint32_t bits = 0; bits <= kInfinityPattern; bits += kStride) f(bits_float(bits));
  for (uint32_t code = 0; code <= format.largest; ++code) {
    const double here = format.value(code), next = format.value(code + 1);
    for (const double boundary : {here, (here + next) / 2}) {
      const uint32_t bits = float_bits(static_cast<float>(boundary));
      for (uint32_t offset = 0; offset <= 2 * kAround; ++offset)
        if (bits + offset >= kAround) f(bits_float(bits + offset - kAround));
    }
  }
  f(kInfinity);
}

template <class Code, class Encode>
void expect_nearest(const Format& format, uint32_t sign_bit, Encode&& encode) {
  const Nearest nearest(format);
  int64_t wrong = 0;
  for_each_magnitude(format, [&](float magnitude) {
    const auto code = static_cast<Code>(nearest(magnitude));
    const bool right =
        encode(magnitude) == code && encode(-magnitude) == static_cast<Code>(code | sign_bit);
    if (!right && ++wrong < 5)
      ADD_FAILURE() << magnitude << " became " << uint32_t{encode(magnitude)} << ", not "
                    << uint32_t{code};
  });
  EXPECT_EQ(wrong, 0);
}

TEST(Float8, EncodesToTheNearest) {
  expect_nearest<uint8_t>(kE4M3, 0x80u, &E4M3::encode);
  expect_nearest<uint8_t>(kE5M2, 0x80u, &E5M2::encode);
}

TEST(Float16, EncodesToTheNearest) {
  expect_nearest<uint16_t>(kHalf, 0x8000u, [](float x) { return Half(x).bits; });
  expect_nearest<uint16_t>(kBFloat16, 0x8000u, [](float x) { return BFloat16(x).bits; });
}

template <class Fp8>
void expect_decoded(const Format& format) {
  for (uint32_t code = 0; code <= format.largest; ++code) {
    EXPECT_EQ(Fp8::decode(static_cast<uint8_t>(code)), format.value(code));
    EXPECT_EQ(Fp8::decode(static_cast<uint8_t>(code | 0x80u)), -format.value(code));
    EXPECT_EQ(Fp8::encode(Fp8::decode(static_cast<uint8_t>(code))), code);
  }
  EXPECT_TRUE(std::signbit(Fp8::decode(0x80)));
}

TEST(Float8, DecodesEveryCode) {
  expect_decoded<E4M3>(kE4M3);
  expect_decoded<E5M2>(kE5M2);
  EXPECT_EQ(E5M2::decode(0x7c), kInfinity);
  EXPECT_EQ(E5M2::decode(0xfc), -kInfinity);
}

TEST(Float16, DecodesEveryCode) {
  for (uint32_t bits = 0; bits < 0x10000u; ++bits) {
    Half half;
    half.bits = static_cast<uint16_t>(bits);
    BFloat16 bfloat16;
    bfloat16.bits = static_cast<uint16_t>(bits);
    const double sign = bits & 0x8000u ? -1.0 : 1.0;
    const auto check = [&](const Format& format, float value) {
      const uint32_t magnitude = bits & 0x7fffu;
      if (magnitude <= format.largest)
        EXPECT_EQ(value, sign * format.value(magnitude));
      else if (magnitude == format.largest + 1)
        EXPECT_EQ(value, sign * kInfinity);
      else
        EXPECT_TRUE(std::isnan(value));
    };
    check(kHalf, static_cast<float>(half));
    check(kBFloat16, static_cast<float>(bfloat16));
  }
}

TEST(Float8, SaturatesInfinitiesAndKeepsNaN) {
  for (const float infinity : {kInfinity, 1e30f}) {
    EXPECT_EQ(E4M3::encode(infinity), 0x7e);
    EXPECT_EQ(E4M3::encode(-infinity), 0xfe);
    EXPECT_EQ(E5M2::encode(infinity), 0x7b);
    EXPECT_EQ(E5M2::encode(-infinity), 0xfb);
  }
  for (const uint32_t bits : {0x7fc00000u, 0xffc00000u, 0x7f800001u, 0xff800001u, 0xffffffffu}) {
    EXPECT_EQ(E4M3::encode(bits_float(bits)), 0x7f);
    EXPECT_EQ(E5M2::encode(bits_float(bits)), 0x7f);
  }
  for (const int code : {0x7f, 0xff}) {
    EXPECT_TRUE(std::isnan(E4M3::decode(static_cast<uint8_t>(code))));
    EXPECT_TRUE(std::isnan(E5M2::decode(static_cast<uint8_t>(code))));
    EXPECT_TRUE(std::isnan(E5M2::decode(static_cast<uint8_t>(code - 1))));
  }
}

TEST(Float16, KeepsNaN) {
  EXPECT_EQ(Half(kQuietNaN).bits, 0x7fff);
  EXPECT_EQ(BFloat16(kQuietNaN).bits, 0x7fff);
}

#if TE_HAS_CUDA_TYPES

uint8_t nvidia(float x, __nv_fp8_interpretation_t format) {
  return __nv_cvt_float_to_fp8(x, __NV_SATFINITE, format);
}

// Counts the values of both signs for which `differs` is true; NaNs are among them.
template <class F>
int64_t count_different(const Format& format, F&& differs) {
  int64_t count = 0;
  for_each_magnitude(format, [&](float x) { count += differs(x) + differs(-x); });
  for (uint32_t bits = 0x7f800001u; bits < 0x80000000u; bits += 4099)
    count += differs(bits_float(bits)) + differs(bits_float(bits | 0x80000000u));
  return count;
}

TEST(AgainstNvidia, Float8) {
  const auto e4m3 = [](float x) { return E4M3::encode(x) != nvidia(x, __NV_E4M3); };
  const auto e5m2 = [](float x) { return E5M2::encode(x) != nvidia(x, __NV_E5M2); };
  EXPECT_EQ(count_different(kE4M3, e4m3), 0);
  EXPECT_EQ(count_different(kE5M2, e5m2), 0);
  for (uint32_t bits = 0; bits < 0x10000u; ++bits) {
    Half half;
    half.bits = static_cast<uint16_t>(bits);
    for (const float x : {static_cast<float>(half), bits_float(bits << 16)})
      EXPECT_FALSE(e4m3(x) || e5m2(x)) << x;
  }
}

TEST(AgainstNvidia, Float16) {
  EXPECT_EQ(
      count_different(kHalf,
                      [](float x) { return Half(x).bits != __half_as_ushort(__float2half_rn(x)); }),
      0);
  EXPECT_EQ(
      count_different(
          kBFloat16,
          [](float x) { return BFloat16(x).bits != __bfloat16_as_ushort(__float2bfloat16_rn(x)); }),
      0);
}

#else

TEST(AgainstNvidia, Conversions) { GTEST_SKIP() << "needs cuda_fp8.h"; }

#endif

}  // namespace
}  // namespace te
