// One-shot collectives on the CPU. Ranks are threads here, so that sanitizers see all their
// accesses to shared memory.
#include "ops/one_shot.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <numeric>
#include <string>
#include <thread>
#include <vector>

namespace te {
namespace {

constexpr int64_t kRoom = 4096;  // bytes of a slot

TensorView vector_of(void* data, DType dtype, int64_t count) {
  TensorView view;
  view.data = data;
  view.dtype = dtype;
  view.rank = 1;
  view.sizes[0] = count;
  view.strides[0] = 1;
  return view;
}

template <class T>
TensorView view_of(std::vector<T>& values, DType dtype) {
  return vector_of(values.data(), dtype, static_cast<int64_t>(values.size()));
}

class OneShot : public testing::TestWithParam<int> {
 protected:
  void SetUp() override {
    const auto bytes = static_cast<size_t>(one_shot_header(ranks_) + 2 * kRoom);
    for (int rank = 0; rank < ranks_; ++rank) memories_.emplace_back(bytes / sizeof(int64_t));
    for (int rank = 0; rank < ranks_; ++rank) {
      groups_.push_back({rank, timeout_, -1, 0});
      for (auto& memory : memories_)
        groups_.back().push_back(reinterpret_cast<int64_t>(memory.data()));
    }
  }

  OneShotArgs args(int rank, const TensorView& x, const TensorView& out) {
    auto& memory = memories_.at(static_cast<size_t>(rank));
    auto& group = groups_.at(static_cast<size_t>(rank));
    const auto bytes = static_cast<int64_t>(memory.size() * sizeof(int64_t));
    return {.x = x,
            .out = out,
            .memory = vector_of(memory.data(), DType::UInt8, bytes),
            .group = view_of(group, DType::Int64),
            .scatters = false,
            .combine = Combine::Concatenate};
  }

  // Calls `act(rank)` on a thread for each rank.
  template <class Act>
  void on_all(const Act& act) {
    std::vector<std::thread> threads;
    for (int rank = 0; rank < ranks_; ++rank) threads.emplace_back([&, rank] { act(rank); });
    for (auto& thread : threads) thread.join();
  }

  int ranks_ = GetParam();
  int64_t timeout_ = 60'000;
  std::vector<std::vector<int64_t>> memories_, groups_;
};

// The value of element `i` of a rank in a step.
float value(int step, int rank, size_t i) {
  return static_cast<float>(step * 7 + rank) + static_cast<float>(i % 13);
}

TEST_P(OneShot, CallsFollowOneAnotherWhateverTheirSizes) {
  const std::vector<size_t> sizes = {1, 700, 3, 5000, 512, 2};
  on_all([&](int rank) {
    for (int step = 0; step < 60; ++step) {
      const size_t size = sizes[static_cast<size_t>(step) % sizes.size()];
      std::vector<float> x(size), sum(size), all(size * static_cast<size_t>(ranks_));
      for (size_t i = 0; i < size; ++i) x[i] = value(step, rank, i);
      const TensorView own = view_of(x, DType::Float32);
      one_shot(args(rank, own, view_of(all, DType::Float32)), {});
      OneShotArgs sums = args(rank, own, view_of(sum, DType::Float32));
      sums.combine = Combine::Sum;
      one_shot(sums, {});
      for (size_t i = 0; i < size; ++i) {
        float expected = 0.0f;
        for (int other = 0; other < ranks_; ++other) {
          expected += value(step, other, i);
          ASSERT_EQ(all[i + size * static_cast<size_t>(other)], value(step, other, i));
        }
        ASSERT_EQ(sum[i], expected);
      }
    }
  });
}

TEST_P(OneShot, PartsGoToTheirRanks) {
  on_all([&](int rank) {
    std::vector<int64_t> x(static_cast<size_t>(ranks_)), out(x.size());
    std::iota(x.begin(), x.end(), 10 * rank);
    OneShotArgs parts = args(rank, view_of(x, DType::Int64), view_of(out, DType::Int64));
    parts.scatters = true;
    one_shot(parts, {});
    for (int other = 0; other < ranks_; ++other)
      EXPECT_EQ(out[static_cast<size_t>(other)], 10 * other + rank);
  });
}

INSTANTIATE_TEST_SUITE_P(Ranks, OneShot, testing::Values(2, 3, 8),
                         [](const auto& info) { return std::to_string(info.param); });

TEST_P(OneShot, ARankThatDoesNotComeIsNamed) {
  groups_[0][1] = 50;  // milliseconds
  std::vector<float> x(3, 1.0f);
  const TensorView own = view_of(x, DType::Float32);
  OneShotArgs sum = args(0, own, own);
  sum.combine = Combine::Max;
  try {
    one_shot(sum, {});
    FAIL() << "it returned";
  } catch (const Error& error) {
    EXPECT_NE(std::string(error.what()).find("expected rank 1 of the group"), std::string::npos);
    EXPECT_NE(std::string(error.what()).find("within 0.05 s"), std::string::npos);
  }
}

}  // namespace
}  // namespace te
