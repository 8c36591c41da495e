#include "core/parallel.h"

#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <exception>
#include <mutex>
#include <thread>
#include <vector>

namespace te {
namespace {

const pid_t g_first_process = getpid();
std::atomic<int> g_threads{1};

}  // namespace

void set_num_threads(int count) { g_threads = std::max(1, count); }

int num_threads() { return getpid() == g_first_process ? g_threads.load() : 1; }

void parallel_for(int64_t count, int64_t grain, const std::function<void(int64_t, int64_t)>& body) {
  if (count <= 0) return;
  const int64_t wanted = std::max<int64_t>(1, count / std::max<int64_t>(1, grain));
  const int64_t parts = std::min<int64_t>(wanted, num_threads());
  if (parts == 1) return body(0, count);

  std::exception_ptr failure;
  std::mutex failure_mutex;
  const auto run = [&](int64_t part) {
    try {
      body(count * part / parts, count * (part + 1) / parts);
    } catch (...) {
      const std::lock_guard lock(failure_mutex);
      failure = std::current_exception();
    }
  };
  std::vector<std::thread> threads;
  threads.reserve(static_cast<size_t>(parts - 1));
  for (int64_t part = 1; part < parts; ++part) threads.emplace_back(run, part);
  run(0);
  for (auto& thread : threads) thread.join();
  if (failure) std::rethrow_exception(failure);
}

}  // namespace te
