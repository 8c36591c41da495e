// A mutex for state that forked children use, too.
#pragma once

#include <mutex>

namespace te::inspect {

// A fork waits until no thread holds one of these, so that children never find one locked by a
// thread that they do not have. Whoever holds one must not lock another, take the GIL or fork.
class ForkMutex {
 public:
  ForkMutex();
  ~ForkMutex();
  ForkMutex(const ForkMutex&) = delete;
  ForkMutex& operator=(const ForkMutex&) = delete;

  void lock() { mutex_.lock(); }
  void unlock() { mutex_.unlock(); }

 private:
  std::mutex mutex_;
};

}  // namespace te::inspect
