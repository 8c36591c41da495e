// How a softmax row is divided among threads. Plain arithmetic without CUDA, so that a CPU test can
// enumerate it (tests/cpp/softmax_policy_test.cpp).
#pragma once

#include <cstdint>
#include <string_view>
#include <type_traits>

#include "core/dtype.h"

namespace te::cuda {

struct SoftmaxPolicy {
  static constexpr int kWarp = 32;
  static constexpr int kRowsPerBlock = 4;  // where a warp has a row of its own
  static constexpr int kMaxThreads = 512;  // per row: leaves 128 registers to each
  // The most accesses of a thread, all in flight at once. 8 accesses of 16 bytes, converted to
  // fp32, still fit the registers. So one warp can handle a row of 2048 16-bit keys, without a
  // barrier.
  static constexpr int kMostPacks = 8;
  static constexpr int kMostSinglePacks = 32;  // of one element, if 16 bytes cannot be accessed

  bool aligned = false;  // every access takes 16 bytes
  int packs = 0;         // accesses per thread; 0: a loop, the row does not fit the registers
  int threads = 0;       // per row

  bool loops() const { return packs == 0; }
  int rows_per_block() const { return threads == kWarp ? kRowsPerBlock : 1; }
  int64_t blocks(int64_t rows) const { return (rows + rows_per_block() - 1) / rows_per_block(); }

  static SoftmaxPolicy of(int64_t keys, DType dtype, bool aligned) {
    const int64_t packs = aligned ? keys * size_of(dtype) / 16 : keys;
    if (aligned && packs <= kWarp) return {aligned, 1, kWarp};
    if (aligned && packs <= 4 * kWarp) return {aligned, 4, kWarp};
    const int most = aligned ? kMostPacks : kMostSinglePacks;
    const int64_t warps = (packs + most * kWarp - 1) / (most * kWarp);
    if (warps * kWarp > kMaxThreads) return {aligned, 0, kMaxThreads};
    return {aligned, most, static_cast<int>(warps * kWarp)};
  }
};

// Calls f(Tag of T, elements per access, packs per thread), the latter two as integral constants.
template <class F>
void dispatch_softmax(const SoftmaxPolicy& policy, DType dtype, std::string_view op, F&& f) {
  dispatch_high_precision(dtype, op, [&](auto tag) {
    constexpr std::integral_constant<int, 16 / sizeof(typename decltype(tag)::type)> wide;
    constexpr std::integral_constant<int, 0> loop;
    constexpr std::integral_constant<int, 1> one;
    constexpr std::integral_constant<int, 4> four;
    constexpr std::integral_constant<int, SoftmaxPolicy::kMostPacks> most;
    constexpr std::integral_constant<int, SoftmaxPolicy::kMostSinglePacks> most_single;
    if (!policy.aligned) return policy.loops() ? f(tag, one, loop) : f(tag, one, most_single);
    switch (policy.packs) {
      case 0: return f(tag, wide, loop);
      case 1: return f(tag, wide, one);
      case 4: return f(tag, wide, four);
      default: return f(tag, wide, most);
    }
  });
}

}  // namespace te::cuda
