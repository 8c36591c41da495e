// Launch parameters of the tile map (device/tile_map.cuh), by what its function reads and writes.
#pragma once

namespace te::cuda {

struct TileMapPolicy {
  int blocks_per_multiprocessor;  // the register budget: 65536 / (256 * blocks) a thread
  int loads_in_flight;            // 16-byte loads that a thread issues before it uses the first

  // The blocks on architectures that were not measured, where kernels need a few more registers.
  constexpr int blocks_elsewhere() const {
    return blocks_per_multiprocessor > 1 ? blocks_per_multiprocessor - 1 : 1;
  }
};

// There are two aims: enough loads in flight to hide the latency of memory (32 KiB on each
// multiprocessor are enough, most policies have 96 KiB and more), and enough blocks that some load
// while others compute and store. A thread that instead reads a row whenever it is done with one
// has loads in flight all the time, but GELU's backward then takes 95 us instead of 80.
//
// Moments take 20 registers from row to row, and a few more for fp16, whose sums are folded more
// often.
template <class Function>
constexpr TileMapPolicy tile_map_policy(bool wide, bool moments = false, bool half = false) {
  if (!wide) return {1, 8};  // the general path spends registers on addresses
  if (moments) {
    if (Function::kOutputs == 2) return half ? TileMapPolicy{1, 12} : TileMapPolicy{2, 6};
    if (Function::kInputs == 2 || (Function::kColumnSums && half)) return {2, 8};
    return {3, 8};
  }
  if (Function::kAgain) return {2, Function::kOutputs == 2 ? 6 : 8};  // a further block of codes
  if (Function::kOutputs == 2) return {2, 12};  // two blocks of codes, two sets of sums
  if (Function::kInputs == 2) return {3, 8};
  if (Function::kColumnSums) return {4, 4};  // {3, 8} is slower where there are few columns
  return {4, 8};
}

}  // namespace te::cuda
