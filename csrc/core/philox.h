// Philox 4x32-7: a counter-based random generator. Four uniform 32-bit words are a pure function of
// a 64-bit key (the seed) and a counter, so any element's bits can be drawn again, anywhere. Seven
// rounds are the fewest that pass all tests of TestU01's BigCrush.
// Salmon, Moraes, Dror, Shaw: Parallel random numbers: as easy as 1, 2, 3 (SC 2011).
#pragma once

#include <cstdint>

#include "core/hd.h"

namespace te {

struct PhiloxWords {
  uint32_t at[4];
};

namespace philox {

inline constexpr int kRounds = 7;
inline constexpr uint32_t kMultiplier0 = 0xd2511f53u;
inline constexpr uint32_t kMultiplier1 = 0xcd9e8d57u;
inline constexpr uint32_t kKeyStep0 = 0x9e3779b9u;  // golden ratio
inline constexpr uint32_t kKeyStep1 = 0xbb67ae85u;  // sqrt(3) - 1

TE_HD PhiloxWords round(const PhiloxWords& c, uint32_t key0, uint32_t key1) {
  const uint64_t product0 = static_cast<uint64_t>(kMultiplier0) * c.at[0];
  const uint64_t product1 = static_cast<uint64_t>(kMultiplier1) * c.at[2];
  return {{static_cast<uint32_t>(product1 >> 32) ^ c.at[1] ^ key0, static_cast<uint32_t>(product1),
           static_cast<uint32_t>(product0 >> 32) ^ c.at[3] ^ key1,
           static_cast<uint32_t>(product0)}};
}

}  // namespace philox

// The full generator: replaces 128-bit counters by random words, under one 64-bit key. With several
// counters in one call, the arithmetic of the key is done once.
template <int kCounters>
TE_HD void philox4x32(PhiloxWords (&words)[kCounters], uint32_t key0, uint32_t key1) {
#if defined(__CUDA_ARCH__)
#pragma unroll
#endif
  for (int i = 0; i < philox::kRounds; ++i) {
#if defined(__CUDA_ARCH__)
#pragma unroll
#endif
    for (int n = 0; n < kCounters; ++n) words[n] = philox::round(words[n], key0, key1);
    key0 += philox::kKeyStep0;
    key1 += philox::kKeyStep1;
  }
}

// The counter of draw number `group` of a stream.
TE_HD PhiloxWords philox_counter(uint64_t group) {
  return {{static_cast<uint32_t>(group), static_cast<uint32_t>(group >> 32), 0u, 0u}};
}

// Replaces counters by the words of the stream with this seed.
template <int kCounters>
TE_HD void draw(PhiloxWords (&words)[kCounters], uint64_t seed) {
  philox4x32(words, static_cast<uint32_t>(seed), static_cast<uint32_t>(seed >> 32));
}

TE_HD PhiloxWords random_words(uint64_t seed, uint64_t group) {
  PhiloxWords words[1] = {philox_counter(group)};
  draw(words, seed);
  return words[0];
}

}  // namespace te
