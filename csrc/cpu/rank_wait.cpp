#include "cpu/rank_wait.h"

#include <fcntl.h>

#include <chrono>
#include <thread>

#include "core/error.h"

namespace te::cpu {
namespace {

using Clock = std::chrono::steady_clock;

constexpr int kSpins = 1000;  // polls before the thread yields, and then before it sleeps
constexpr auto kNap = std::chrono::microseconds(50);
constexpr int kNapsPerLook = 2000;

// Asks the kernel whether the awaited process still has its byte of the file locked.
bool has_ended(const AwaitedRank& awaited) {
  if (awaited.lock_file < 0) return false;
  struct flock lock {};
  lock.l_type = F_WRLCK;
  lock.l_whence = SEEK_SET;
  lock.l_start = awaited.rank;
  lock.l_len = 1;
  const int found = fcntl(static_cast<int>(awaited.lock_file), F_GETLK, &lock);
  return found == 0 && lock.l_type == F_UNLCK;
}

}  // namespace

void wait_for_rank(const AwaitedRank& awaited, std::string_view op,
                   const std::function<bool()>& there) {
  for (int i = 0; i < kSpins; ++i)
    if (there()) return;
  const auto deadline = Clock::now() + std::chrono::milliseconds(awaited.timeout);
  for (int naps = 1; !there(); ++naps) {
    if (naps < kSpins)
      std::this_thread::yield();
    else
      std::this_thread::sleep_for(kNap);
    if (naps % kNapsPerLook != 0) continue;
    require(!has_ended(awaited) || there(), Kind::Runtime, op, "expected rank ", awaited.rank,
            " of the group to take part in a collective, but its process has ended");
    require(Clock::now() < deadline, Kind::Runtime, op, "expected rank ", awaited.rank,
            " of the group to take part in a collective within ",
            static_cast<double>(awaited.timeout) / 1000.0, " s, but it did not come");
  }
}

}  // namespace te::cpu
