#include "inspect/engine.h"

namespace te::inspect {

std::optional<FeatureId> Engine::add(Feature feature) {
  const std::lock_guard lock(mutex_);
  feature.id = last_id_ + 1;
  if (!registry_.add(std::move(feature))) return std::nullopt;
  return ++last_id_;
}

void Engine::remove(FeatureId id) {
  const std::lock_guard lock(mutex_);
  registry_.remove(id);
}

Registry Engine::registry() const {
  const std::lock_guard lock(mutex_);
  return registry_;
}

std::shared_ptr<Session> Engine::begin(Config config, Registry registry, Callouts callouts,
                                       LogOptions log, Clock clock) {
  uint64_t epoch = 0;
  {
    const std::lock_guard lock(mutex_);
    epoch = ++last_epoch_;
  }
  return std::make_shared<Session>(epoch, std::move(config), std::move(registry),
                                   std::move(callouts), std::move(log), std::move(clock));
}

}  // namespace te::inspect
