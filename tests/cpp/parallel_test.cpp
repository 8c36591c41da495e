#include "core/parallel.h"

#include <gtest/gtest.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cfenv>
#include <mutex>
#include <stdexcept>
#include <thread>
#include <utility>
#include <vector>

namespace te {
namespace {

class Parallel : public testing::Test {
 protected:
  void SetUp() override { set_num_threads(4); }
  void TearDown() override { set_num_threads(1); }
};

int64_t sum_below(int64_t count) {
  std::atomic<int64_t> sum = 0;
  parallel_for(count, 1, [&](int64_t first, int64_t last) {
    for (int64_t i = first; i < last; ++i) sum += i;
  });
  return sum;
}

using Parts = std::vector<std::pair<int64_t, int64_t>>;

Parts parts_of(int64_t count, int64_t grain) {
  std::mutex mutex;
  Parts parts;
  parallel_for(count, grain, [&](int64_t first, int64_t last) {
    const std::lock_guard lock(mutex);
    parts.emplace_back(first, last);
  });
  std::sort(parts.begin(), parts.end());
  return parts;
}

TEST_F(Parallel, PartsDependOnNumbersAlone) {
  for (int repetition = 0; repetition < 100; ++repetition) {
    EXPECT_EQ(parts_of(10, 1), (Parts{{0, 2}, {2, 5}, {5, 7}, {7, 10}}));
    EXPECT_EQ(parts_of(10, 4), (Parts{{0, 5}, {5, 10}}));
    EXPECT_EQ(parts_of(10, 6), (Parts{{0, 10}}));
  }
  EXPECT_TRUE(parts_of(0, 1).empty());
  set_num_threads(2);
  EXPECT_EQ(parts_of(10, 1), (Parts{{0, 5}, {5, 10}}));
  set_num_threads(0);
  EXPECT_EQ(parts_of(10, 1), (Parts{{0, 10}}));
}

TEST_F(Parallel, LoopsMayBeNested) {
  std::atomic<int64_t> sum = 0;
  parallel_for(16, 1, [&](int64_t first, int64_t last) {
    for (int64_t i = first; i < last; ++i)
      parallel_for(8, 1, [&](int64_t from, int64_t to) { sum += sum_below(10) * (to - from); });
  });
  EXPECT_EQ(sum, 16 * 8 * 45);
}

TEST_F(Parallel, ManyThreadsMayCall) {
  std::atomic<int> right = 0;
  std::vector<std::thread> callers;
  for (int i = 0; i < 6; ++i) {
    callers.emplace_back([&] {
      for (int repetition = 0; repetition < 200; ++repetition) right += sum_below(1000) == 499500;
    });
  }
  for (auto& caller : callers) caller.join();
  EXPECT_EQ(right, 6 * 200);
}

TEST_F(Parallel, ExceptionsReachTheCaller) {
  for (int64_t bad = 0; bad < 4; ++bad) {
    std::atomic<int> calls = 0;
    const auto throws = [&] {
      parallel_for(4, 1, [&](int64_t first, int64_t) {
        ++calls;
        if (first == bad) throw std::out_of_range("bad");
      });
    };
    EXPECT_THROW(throws(), std::out_of_range);
    EXPECT_EQ(calls, 4);
  }
  EXPECT_EQ(sum_below(100), 4950);
}

TEST_F(Parallel, EveryPartRoundsAsTheCallerDoes) {
  sum_below(100);  // starts the threads
  for (const int mode : {FE_UPWARD, FE_DOWNWARD, FE_TONEAREST}) {
    std::fesetround(mode);
    std::atomic<int> others = 0;
    for (int repetition = 0; repetition < 50; ++repetition)
      parallel_for(4, 1, [&](int64_t, int64_t) { others += std::fegetround() != mode; });
    EXPECT_EQ(others, 0);
  }
}

#ifndef __SANITIZE_THREAD__  // it does not support threads that a forked child starts

TEST_F(Parallel, ForkedChildrenHaveThreadsOfTheirOwn) {
  std::atomic<bool> go_on = true;
  std::thread other([&] {  // the pool is in use while the process forks
    while (go_on) sum_below(1000);
  });
  for (int repetition = 0; repetition < 20; ++repetition) {
    const pid_t child = fork();
    if (child == 0) {
      alarm(20);
      const bool right = parts_of(10, 1).size() == 4 && sum_below(1000) == 499500;
      _exit(right ? 0 : 1);
    }
    int status = -1;
    ASSERT_EQ(waitpid(child, &status, 0), child);
    EXPECT_EQ(status, 0);
    EXPECT_EQ(sum_below(1000), 499500);
  }
  go_on = false;
  other.join();
}

#endif

}  // namespace
}  // namespace te
