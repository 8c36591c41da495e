#include "inspect/messages.h"

namespace te::inspect {

std::string name_of_level(int level) {
  switch (level) {
    case 10: return "DEBUG";
    case level::kInfo: return "INFO";
    case level::kWarning: return "WARNING";
    case 40: return "ERROR";
    case 50: return "CRITICAL";
    default: return "Level " + std::to_string(level);
  }
}

bool OneShot::first(const std::string& key) {
  const std::lock_guard lock(mutex_);
  if (seen_.contains(key)) return false;
  if (seen_.size() < kBound) seen_.insert(key);
  return true;
}

}  // namespace te::inspect
