// Engine: the registered feature classes of the process, which outlive sessions, and the beginning
// of sessions.
#pragma once

#include <cstdint>
#include <memory>
#include <optional>

#include "inspect/fork_mutex.h"
#include "inspect/registry.h"
#include "inspect/session.h"

namespace te::inspect {

class Engine {
 public:
  // Returns the id of the new feature, or nothing if its namespace already has a feature of the
  // name.
  std::optional<FeatureId> add(Feature feature);
  void remove(FeatureId id);
  Registry registry() const;  // a copy

  // `config` must have been read with the rules of `registry`.
  std::shared_ptr<Session> begin(Config config, Registry registry, Callouts callouts,
                                 LogOptions log, Clock clock = std::chrono::system_clock::now);

 private:
  mutable ForkMutex mutex_;
  Registry registry_;
  FeatureId last_id_ = 0;
  uint64_t last_epoch_ = 0;
};

}  // namespace te::inspect
