// The launch policies of softmax: the threads of a row cover all its keys, and each policy has a
// kernel.
#include "cuda/policy/softmax.h"

#include <gtest/gtest.h>

namespace te::cuda {
namespace {

void expect_row_is_covered(int64_t keys, DType dtype, bool aligned) {
  const auto policy = SoftmaxPolicy::of(keys, dtype, aligned);
  ASSERT_EQ(policy.threads % SoftmaxPolicy::kWarp, 0);
  ASSERT_LE(policy.threads, SoftmaxPolicy::kMaxThreads);
  ASSERT_TRUE(policy.rows_per_block() == 1 || policy.threads == SoftmaxPolicy::kWarp);
  ASSERT_GE(policy.blocks(1001) * policy.rows_per_block(), 1001);
  dispatch_softmax(policy, dtype, "test", [&](auto, auto elements, auto packs) {
    ASSERT_EQ(packs, policy.packs);
    ASSERT_EQ(elements, aligned ? 16 / size_of(dtype) : 1);
    if (!policy.loops()) {
      ASSERT_GE(int64_t{policy.threads} * packs * elements, keys);
    }
  });
}

TEST(SoftmaxPolicy, CoversEveryRow) {
  for (const DType dtype : {DType::Float32, DType::BFloat16}) {
    const int64_t elements = 16 / size_of(dtype);
    for (int64_t keys = 1; keys < 40000; keys += keys < 3000 ? 1 : 97) {
      expect_row_is_covered(keys, dtype, false);
      expect_row_is_covered(keys * elements, dtype, true);
    }
  }
}

TEST(SoftmaxPolicy, OneWarpHoldsARowOf2048HalfPrecisionKeys) {
  EXPECT_EQ(SoftmaxPolicy::of(2048, DType::BFloat16, true).threads, SoftmaxPolicy::kWarp);
  EXPECT_FALSE(SoftmaxPolicy::of(32768, DType::BFloat16, true).loops());
  EXPECT_TRUE(SoftmaxPolicy::of(32776, DType::BFloat16, true).loops());
}

}  // namespace
}  // namespace te::cuda
