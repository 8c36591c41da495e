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

// A call of parallel_for, for as long as it runs. The pool's mutex guards it.
struct Loop {
  const Body& body;
  const int64_t count, parts;
  const std::fenv_t rounding;  // the caller's: no result depends on which thread computes a part
  int64_t started = 0, finished = 0;
  std::exception_ptr failure = nullptr;
};

// Threads that wait for loops. A caller works on its own loop until every part is started, so that
// a loop ends also where all threads are busy with others: with those of other callers, or with
// one whose parts call parallel_for themselves.
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

  // Loops that come later run in their callers.
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
      // The system gives no more threads: fewer do.
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

  // Called, and returns, with the lock held. A loop is gone once its last part has finished.
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

// A forked child has no thread but its own, and a mutex in whatever state: it begins anew.
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
