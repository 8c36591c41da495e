// If a build lacks a part, the errors of functions that need it say which part, why it is missing,
// and the command that adds it.
#include "cuda/left_out.h"

#include <gtest/gtest.h>

#include "core/error.h"
#include "cuda/runtime.h"
#include "ops/attention.h"
#include "ops/cast.h"

namespace te::cuda {
namespace {

TEST(LeftOut, SaysWhetherCudaIsThere) {
  bool lacks_cuda = false;
  for (const LeftOut& one : left_out()) {
    lacks_cuda |= one.part == "CUDA";
    EXPECT_FALSE(one.reason.empty());
    EXPECT_NE(one.command.find("pip install"), std::string::npos) << one.command;
  }
  EXPECT_EQ(lacks_cuda, !built_with_cuda());
}

TEST(LeftOut, ErrorsGiveReasonAndCommand) {
  if (built_with_cuda()) GTEST_SKIP() << "of builds without CUDA";
  const LeftOut& cuda = left_out().front();
  const std::string told =
      "this build lacks CUDA: " + cuda.reason + "; in the sources run: " + cuda.command;
  EXPECT_EQ(lack_of("CUDA"), told);
  try {
    te::cuda::cast(CastArgs{}, Stream{});
    FAIL() << "a kernel ran";
  } catch (const Error& error) {
    EXPECT_EQ(error.kind(), Kind::Unsupported);
    EXPECT_EQ(error.what(), "[cast] got a CUDA tensor, but " + told);
  }
  EXPECT_EQ(te::cuda::attention_refusal(AttentionArgs{}, nullptr), told);
}

}  // namespace
}  // namespace te::cuda
