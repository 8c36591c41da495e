// How a rank waits for another one of its host on the CPU.
#pragma once

#include <functional>
#include <string_view>

#include "core/awaited_rank.h"

namespace te::cpu {

// Returns once `there()` is true. Fails if the rank ended, or did not come in time.
void wait_for_rank(const AwaitedRank& awaited, std::string_view op,
                   const std::function<bool()>& there);

}  // namespace te::cpu
