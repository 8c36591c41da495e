#include "inspect/decisions.h"

#include <algorithm>

namespace te::inspect {

namespace {

constexpr std::string_view kFp8 = "fp8_gemm_enabled";

}  // namespace

bool merged(std::string_view api, const std::vector<bool>& said) {
  if (api == kFp8) return std::ranges::all_of(said, std::identity{});
  return std::ranges::any_of(said, std::identity{});
}

bool Decisions::Entry::holds(int64_t iteration) const {
  if (iteration == from) return true;
  return iteration > from && !decision->once && (!decision->next || iteration < *decision->next);
}

std::shared_ptr<const Decision> Decisions::decide(const Target& target, const Route& route,
                                                  int64_t iteration, FeatureCall& features) {
  Entry last;
  {
    const std::lock_guard lock(mutex_);
    if (const auto found = entries_.find(target); found != entries_.end()) {
      if (found->second.holds(iteration)) return found->second.decision;
      if (iteration >= found->second.from) last = found->second;
    }
  }
  Entry entry{.until = {}, .from = iteration, .decision = nullptr};
  Decision decision{.yes = false, .next = std::nullopt, .once = false, .route = route, .said = {}};
  for (size_t i = 0; i < route->size(); ++i) {
    if (last.decision && (!last.until[i] || iteration < *last.until[i])) {
      entry.until.push_back(last.until[i]);
      decision.said.push_back(target.api == kFp8 && last.decision->said[i]);
    } else {
      Answer answer = features.ask((*route)[i], target, iteration);
      if (answer.next) answer.next = std::max(*answer.next, iteration + 1);
      entry.until.push_back(answer.next);
      decision.said.push_back(answer.yes);
    }
    if (const auto until = entry.until.back())
      decision.next = std::min(*until, decision.next.value_or(*until));
  }
  decision.yes = merged(target.api, decision.said);
  decision.once = decision.yes && target.api != kFp8;
  entry.decision = std::make_shared<const Decision>(std::move(decision));
  const std::lock_guard lock(mutex_);
  return (entries_[target] = std::move(entry)).decision;
}

}  // namespace te::inspect
