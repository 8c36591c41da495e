// wait_for_rank: waits on the CPU for another rank of the same host. It polls: first without a
// pause, then it yields between polls, then it sleeps 50 us between them. While it sleeps, it
// checks every 0.1 s whether the other process has ended or the timeout is over.
#pragma once

#include <functional>
#include <string_view>

#include "core/awaited_rank.h"

namespace te::cpu {

// Returns once `there()` is true. Throws if the rank's process has ended, or after the timeout.
void wait_for_rank(const AwaitedRank& awaited, std::string_view op,
                   const std::function<bool()>& there);

}  // namespace te::cpu
