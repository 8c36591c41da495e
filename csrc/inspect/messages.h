// Messages of the debug log: levels, and the keys of messages that are written once.
#pragma once

#include <string>
#include <unordered_set>

#include "inspect/fork_mutex.h"

namespace te::inspect {

// The numbers are those of Python's logging.
namespace level {
inline constexpr int kInfo = 20;
inline constexpr int kWarning = 30;
}  // namespace level

// "INFO"; "Level 25" for a number without a name.
std::string name_of_level(int level);

// The keys of messages that are written once.
class OneShot {
 public:
  // True for the first call with this key. Once there are kBound keys, further ones are not stored,
  // and messages with these are repeated.
  bool first(const std::string& key);

 private:
  static constexpr size_t kBound = 1 << 16;
  ForkMutex mutex_;
  std::unordered_set<std::string> seen_;
};

}  // namespace te::inspect
