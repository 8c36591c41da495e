// Session: the state of the debugger from initialize() to end_debug(), with its configuration,
// routes, answers of features, and logs.
#pragma once

#include <atomic>
#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "inspect/callouts.h"
#include "inspect/config.h"
#include "inspect/decisions.h"
#include "inspect/logs.h"
#include "inspect/messages.h"
#include "inspect/registry.h"
#include "inspect/routing.h"

namespace te::inspect {

// The implementations of the interfaces that a session calls.
struct Callouts {
  RegexSearch regex;
  std::shared_ptr<FeatureCall> features;
  std::shared_ptr<Sink> sink;
};

// All members may be called on any thread. They do not call interfaces while they hold a mutex.
class Session {
 public:
  Session(uint64_t epoch, Config config, Registry registry, Callouts callouts, LogOptions log,
          Clock clock);

  uint64_t epoch() const { return epoch_; }  // unique in the process
  const Config& config() const { return config_; }
  FeatureCall& features() const { return *callouts_.features; }

  // The number of calls of step(), unless it was set.
  int64_t iteration() const { return iteration_; }
  void set_iteration(int64_t iteration) { iteration_ = iteration; }

  Route route(const Target& target) { return router_.route(target); }
  std::vector<int> sections_of(const std::string& layer) { return router_.sections_of(layer); }
  std::vector<std::string> layers() const { return router_.layers(); }

  // The answer to a routing call.
  std::shared_ptr<const Decision> decide(const Target& target, int64_t iteration);
  // The features to call for a target: those whose routing call `<api>_enabled` said yes, or all of
  // the route if no feature of the namespace has that call. Throws Error (Runtime) if several
  // features modify one tensor.
  std::vector<const RoutedUse*> active(const Target& target, int64_t iteration);

  // Writes a line to the debug log, after the name of the layer. With a key, `once`, the message is
  // written once in the session.
  void log_message(int level, const std::string& text, const std::string& layer = "",
                   const std::optional<std::string>& once = std::nullopt);
  void log_statistic(const StatisticRow& row) { logs_.add(row); }

  void advance() { ++iteration_; }
  // Ends a step after its statistics were logged: writes the files, and after the first step
  // reports sections that select no layer.
  void settle();
  void flush();
  // Ends the session: writes and unlocks the files, and warns if lines are lost.
  void finish();

 private:
  void report_unmatched();

  const uint64_t epoch_;
  const Config config_;
  const Registry registry_;
  const Callouts callouts_;
  std::atomic<int64_t> iteration_ = 0;
  std::atomic<bool> settled_ = false;
  Router router_;
  Decisions decisions_;
  OneShot once_;
  Logs logs_;
};

}  // namespace te::inspect
