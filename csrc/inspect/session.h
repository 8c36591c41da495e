// One initialize() ... end_debug(): a configuration at work.
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

// How the session reaches the outside.
struct Callouts {
  RegexSearch regex;
  std::shared_ptr<FeatureCall> features;
  std::shared_ptr<Sink> sink;
};

// Every member may be called from any thread; none calls out with a mutex held.
class Session {
 public:
  Session(uint64_t epoch, Config config, Registry registry, Callouts callouts, LogOptions log,
          Clock clock);

  uint64_t epoch() const { return epoch_; }  // another for every session of the process
  const Config& config() const { return config_; }
  FeatureCall& features() const { return *callouts_.features; }

  // How often step() was called, unless set.
  int64_t iteration() const { return iteration_; }
  void set_iteration(int64_t iteration) { iteration_ = iteration; }

  Route route(const Target& target) { return router_.route(target); }
  std::vector<int> sections_of(const std::string& layer) { return router_.sections_of(layer); }
  std::vector<std::string> layers() const { return router_.layers(); }

  // The answer to a routing call.
  std::shared_ptr<const Decision> decide(const Target& target, int64_t iteration);
  // The features that a GEMM call reaches: those whose own routing call said yes. All of them, if
  // no feature of the namespace has a routing call `<api>_enabled`. Throws Error (Runtime) where
  // several want to modify one tensor.
  std::vector<const RoutedUse*> active(const Target& target, int64_t iteration);

  // A line of the debug log, prefixed by the layer. With a key: once per session and key.
  void log_message(int level, const std::string& text, const std::string& layer = "",
                   const std::optional<std::string>& once = std::nullopt);
  void log_statistic(const StatisticRow& row) { logs_.add(row); }

  void advance() { ++iteration_; }
  // The end of a step, after everyone has logged: writes, and reports after the first step sections
  // that select no layer.
  void settle();
  void flush();
  // The session is over: writes, says what is lost, and lets other processes have the files.
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
