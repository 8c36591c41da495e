#include "inspect/fork_mutex.h"

#include <pthread.h>

#include <set>

namespace te::inspect {

namespace {

struct All {
  std::mutex mutex;
  std::set<ForkMutex*> members;
};

// Never destroyed: mutexes with static storage may be destroyed later.
All& all() {
  static All& instance = *new All;
  return instance;
}

void before_fork() {
  all().mutex.lock();
  for (ForkMutex* member : all().members) member->lock();
}

void after_fork() {
  for (ForkMutex* member : all().members) member->unlock();
  all().mutex.unlock();
}

[[maybe_unused]] const int g_at_fork = pthread_atfork(before_fork, after_fork, after_fork);

}  // namespace

ForkMutex::ForkMutex() {
  const std::lock_guard lock(all().mutex);
  all().members.insert(this);
}

ForkMutex::~ForkMutex() {
  const std::lock_guard lock(all().mutex);
  all().members.erase(this);
}

}  // namespace te::inspect
