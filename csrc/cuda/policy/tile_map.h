// Launch knobs of the tile map (device/tile_map.cuh), by how many matrices it reads and writes.
#pragma once

namespace te::cuda {

struct TileMapPolicy {
  int blocks_per_multiprocessor;  // the register budget: 65536 / (256 * blocks) a thread
  int loads_in_flight;            // 16-byte loads that a thread issues before it uses the first
};

// Two aims: enough loads in flight to hide memory (32 KiB on each multiprocessor would do, this is
// 96 KiB and more), and enough blocks that some load while others compute and store.
constexpr TileMapPolicy tile_map_policy(int inputs, int outputs, bool wide) {
  if (!wide) return {1, 8};          // the general path spends registers on addresses
  if (outputs == 2) return {2, 12};  // two blocks of codes and two sets of sums stay in registers
  if (inputs == 2) return {3, 8};
  return {4, 8};
}

}  // namespace te::cuda
