#include "core/parallel.h"

#include <pthread.h>

#include <algorithm>
#include <atomic>
#include <cfenv>
#include <condition_variable>
#include <exception>
#include <memory>
#include <mutex>
#include <system_error>
#include <thread>
#include <utility>
#include <vector>

namespace te {
namespace {

using Body = std::function<void(int64_t, int64_t)>;

// A running call of parallel_for. It is on the caller's stack, and the pool's mutex guards it.
struct Loop {
  const Body& body;
  const int64_t count, parts;
  const std::fenv_t rounding;  // the caller's mode, set in all threads so that results are equal
  int64_t started = 0, finished = 0;
  std::exception_ptr failure = nullptr;
};

// Worker threads and a queue of loops. Each worker takes the next part of the first loop in the
// queue. The caller also takes parts of its own loop until all are started. So a loop ends even if
// every worker is busy with the loops of other callers, or with an outer loop whose body has called
// parallel_for.
class Pool {
 public:
  void run(Loop& loop) {
    std::unique_lock lock(mutex_);
    start_threads(static_cast<size_t>(loop.parts - 1));
    loops_.push_back(&loop);
    for (int64_t part = 1; part < loop.parts; ++part) wake_.notify_one();
    while (loop.started < loop.parts) run_part(loop, lock);
    done_.wait(lock, [&] { return loop.finished == loop.parts; });
  }

  // Ends the workers. Later loops run in the threads of their callers.
  void stop() {
    {
      const std::lock_guard lock(mutex_);
      stopping_ = true;
    }
    wake_.notify_all();
    for (auto& thread : threads_) thread.join();
  }

 private:
  void start_threads(size_t count) {
    try {
      while (threads_.size() < count && !stopping_) threads_.emplace_back([this] { serve(); });
    } catch (const std::system_error&) {
      // The system gives no more threads, so the loop runs on those that there are.
    }
  }

  void serve() {
    std::unique_lock lock(mutex_);
    while (true) {
      wake_.wait(lock, [&] { return stopping_ || !loops_.empty(); });
      if (stopping_) return;
      Loop& loop = *loops_.front();
      std::fesetenv(&loop.rounding);
      run_part(loop, lock);
    }
  }

  // The lock is held before and after the call, but not while the body runs. Once the last part has
  // finished and the lock is released, the loop no longer exists.
  void run_part(Loop& loop, std::unique_lock<std::mutex>& lock) {
    const int64_t part = loop.started++;
    if (loop.started == loop.parts) std::erase(loops_, &loop);
    lock.unlock();
    std::exception_ptr failure;
    try {
      loop.body(loop.count * part / loop.parts, loop.count * (part + 1) / loop.parts);
    } catch (...) {
      failure = std::current_exception();
    }
    lock.lock();
    if (failure) loop.failure = std::move(failure);
    if (++loop.finished == loop.parts) done_.notify_all();
  }

  std::mutex mutex_;
  std::condition_variable wake_, done_;
  std::vector<Loop*> loops_;  // with parts to start
  std::vector<std::thread> threads_;
  bool stopping_ = false;
};

std::atomic<int> g_threads{1};
std::atomic<Pool*> g_pool{nullptr};  // never destroyed: other threads may use it to the very end

// A forked child has none of the workers, and its copy of the mutex may be locked for ever. So it
// forgets the pool, and the next loop makes a new one.
[[maybe_unused]] const int g_at_fork = pthread_atfork(nullptr, nullptr, [] { g_pool = nullptr; });

const struct AtExit {
  ~AtExit() {
    if (Pool* pool = g_pool) pool->stop();
  }
} g_at_exit;

Pool& pool() {
  Pool* found = g_pool;
  if (found != nullptr) return *found;
  auto fresh = std::make_unique<Pool>();
  return g_pool.compare_exchange_strong(found, fresh.get()) ? *fresh.release() : *found;
}

}  // namespace

void set_num_threads(int count) { g_threads = std::max(1, count); }

void parallel_for(int64_t count, int64_t grain, const Body& body) {
  if (count <= 0) return;
  const int64_t wanted = std::max<int64_t>(1, count / std::max<int64_t>(1, grain));
  const int64_t parts = std::min<int64_t>(wanted, g_threads);
  if (parts == 1) return body(0, count);
  std::fenv_t rounding;
  std::fegetenv(&rounding);
  Loop loop{.body = body, .count = count, .parts = parts, .rounding = rounding};
  pool().run(loop);
  if (loop.failure) std::rethrow_exception(loop.failure);
}

}  // namespace te
