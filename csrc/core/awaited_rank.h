// A rank of this host for which another one waits on the CPU.
#pragma once

#include <cstdint>

namespace te {

struct AwaitedRank {
  int rank;
  int64_t timeout;    // in milliseconds
  int64_t lock_file;  // of which rank r locks byte r as long as it lives; -1 if there is none
};

}  // namespace te
