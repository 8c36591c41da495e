// The limits of devices, and of devices whose features are switched off. Needs no GPU.
#include "cuda/policy/device_limits.h"

#include <gtest/gtest.h>

namespace te::cuda {
namespace {

constexpr DeviceFacts kA100{80, 80, 108, 163 << 10};
constexpr DeviceFacts kL40{89, 89, 142, 99 << 10};
constexpr DeviceFacts kH200{90, 90, 132, 227 << 10};
constexpr DeviceFacts kB200{100, 100, 148, 227 << 10};

TEST(DeviceLimits, FollowTheGeneration) {
  const DeviceLimits ampere = limits_of(kA100, {});
  EXPECT_EQ(ampere.cluster, 1);
  EXPECT_FALSE(ampere.dependent_launch);
  EXPECT_FALSE(ampere.fp8_conversion);
  EXPECT_FALSE(ampere.fp8_products);
  EXPECT_EQ(ampere.shared_bytes, 163 << 10);

  const DeviceLimits ada = limits_of(kL40, {});
  EXPECT_TRUE(ada.fp8_conversion);
  EXPECT_TRUE(ada.fp8_products);
  EXPECT_FALSE(ada.block_scales);
  EXPECT_EQ(ada.cluster, 1);

  const DeviceLimits hopper = limits_of(kH200, {});
  EXPECT_TRUE(hopper.dependent_launch);
  EXPECT_TRUE(hopper.block_scales);
  EXPECT_EQ(hopper.cluster, kMaxCluster);

  EXPECT_TRUE(limits_of(kB200, {}).fp8_products);
  EXPECT_FALSE(limits_of(kB200, {}).block_scales);
}

// Code for an older architecture on a new device: features that need new instructions are missing,
// but those of cuBLASLt are there.
TEST(DeviceLimits, OfPortableCodeAreThoseOfTheCode) {
  const DeviceLimits limits = limits_of({90, 80, 132, 227 << 10}, {});
  EXPECT_EQ(limits.cluster, 1);
  EXPECT_FALSE(limits.dependent_launch);
  EXPECT_FALSE(limits.fp8_conversion);
  EXPECT_TRUE(limits.fp8_products);
  EXPECT_TRUE(limits.block_scales);
}

TEST(DeviceLimits, LoseWhatIsSwitchedOff) {
  const DeviceSwitches off{false, false, false, 99 << 10};
  const DeviceLimits limits = limits_of(kH200, off);
  EXPECT_EQ(limits.cluster, 1);
  EXPECT_FALSE(limits.dependent_launch);
  EXPECT_FALSE(limits.fp8_products);
  EXPECT_FALSE(limits.block_scales);
  EXPECT_EQ(limits.shared_bytes, 99 << 10);
  EXPECT_TRUE(limits.fp8_conversion) << "the codes are the same with and without the instruction";
}

TEST(DeviceLimits, HaveNoMoreMemoryThanTheDevice) {
  EXPECT_EQ(limits_of(kL40, {.shared_bytes = 227 << 10}).shared_bytes, 99 << 10);
}

}  // namespace
}  // namespace te::cuda
