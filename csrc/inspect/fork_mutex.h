// A mutex for state that forked child processes use, too.
#pragma once

#include <mutex>

namespace te::inspect {

// fork() locks all mutexes of this class before it copies the process, and unlocks them in parent
// and child. Otherwise a child could have a mutex that is locked for ever, by a thread that does
// not exist in the child. A thread that holds one must not lock another, take the GIL, or fork.
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
