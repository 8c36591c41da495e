// A rank of the same host that a rank waits for on the CPU, and how it can tell that the awaited
// process has ended.
#pragma once

#include <cstdint>

namespace te {

struct AwaitedRank {
  int rank;
  int64_t timeout;    // in milliseconds
  int64_t lock_file;  // file descriptor: rank r has byte r locked while it lives; -1: no such file
};

}  // namespace te
