// Conversion between a floating-point number and its bit pattern, on host and device.
#pragma once

#include <bit>
#include <cstdint>

#include "core/hd.h"

namespace te {

TE_HD uint32_t float_bits(float value) {
#if defined(__CUDA_ARCH__)
  return __float_as_uint(value);
#else
  return std::bit_cast<uint32_t>(value);
#endif
}

TE_HD float bits_float(uint32_t bits) {
#if defined(__CUDA_ARCH__)
  return __uint_as_float(bits);
#else
  return std::bit_cast<float>(bits);
#endif
}

TE_HD uint32_t low_bits(double value) {
#if defined(__CUDA_ARCH__)
  return static_cast<uint32_t>(__double2loint(value));
#else
  return static_cast<uint32_t>(std::bit_cast<uint64_t>(value));
#endif
}

}  // namespace te
