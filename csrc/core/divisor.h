// Division of many integers by the same divisor. The constructor computes a factor and a shift,
// with which each quotient takes a multiplication, an addition and a shift instead of a division.
#pragma once

#include <cstdint>

#include "core/hd.h"

namespace te {

// Divides numbers of 0 ... 2^31 - 1 by a divisor of 1 ... 2^31.
class Divisor {
 public:
  explicit Divisor(uint32_t value) : value_(value) {
    while ((uint64_t{1} << shift_) < value) ++shift_;
    const uint64_t over = (uint64_t{1} << shift_) - value;
    factor_ = static_cast<uint32_t>((over << 32) / value + 1);
  }

  TE_HD uint32_t value() const { return value_; }
  TE_HD uint32_t quotient(uint32_t number) const {
    return (static_cast<uint32_t>(uint64_t{number} * factor_ >> 32) + number) >> shift_;
  }

 private:
  uint32_t value_, factor_, shift_ = 0;  // quotient = number * (2^32 + factor) / 2^(32 + shift)
};

}  // namespace te
