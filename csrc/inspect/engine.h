// What outlives the sessions of a process: the features that its modules define.
#pragma once

#include <cstdint>
#include <memory>
#include <mutex>
#include <optional>

#include "inspect/registry.h"
#include "inspect/session.h"

namespace te::inspect {

class Engine {
 public:
  // Gives the feature its id. None, if its namespace has the name already.
  std::optional<FeatureId> add(Feature feature);
  void remove(FeatureId id);
  Registry registry() const;  // as it is now

  // `config` must have been read with the rules of `registry`.
  std::shared_ptr<Session> begin(Config config, Registry registry, Callouts callouts,
                                 LogOptions log, Clock clock = std::chrono::system_clock::now);

 private:
  mutable std::mutex mutex_;
  Registry registry_;
  FeatureId last_id_ = 0;
  uint64_t last_epoch_ = 0;
};

}  // namespace te::inspect
