// Launch parameters of quantize_blocks, by what a thread holds in registers.
#pragma once

#include <cstddef>

namespace te::cuda {

// How many blocks of 256 threads share a multiprocessor: the register budget is 65536 / (256 *
// blocks) per thread. A thread keeps its 64 values until the scales of their columns are known: 32
// registers of 16-bit values, 64 of fp32.
constexpr int quantize_blocks_residency(size_t value_bytes, bool column_sums, bool wide) {
  if (!wide) return 1;  // the general path spends registers on addresses
  if (value_bytes == 4) return 2;
  return column_sums ? 3 : 4;
}

}  // namespace te::cuda
