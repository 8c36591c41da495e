// Interfaces through which the engine calls features and prints messages. The bindings implement
// them, and tests use fakes. They may be called on any thread, but the engine never calls them
// while it holds a mutex.
#pragma once

#include <cstdint>
#include <optional>
#include <string>

#include "inspect/node.h"

namespace te::inspect {

using FeatureId = int;

// The target of a call: a method of a namespace, the layer, and the tensor and gemm if the call has
// them.
struct Target {
  std::string ns, api, layer;
  std::optional<std::string> tensor, gemm;

  bool operator==(const Target&) const = default;
};

struct TargetHash {
  size_t operator()(const Target& target) const;
};

// "layer fc1, tensor weight, gemm fprop"
std::string describe(const Target& target);

// What a routing call (`*_enabled`) returned.
struct Answer {
  bool yes = false;
  std::optional<int64_t> next;  // the iteration at which the answer may change; none: never

  bool operator==(const Answer&) const = default;
};

struct RoutedUse;

// Calls of features.
class FeatureCall {
 public:
  virtual ~FeatureCall() = default;

  // Runs a feature file, which registers its classes. Returns an error message, or nothing.
  virtual std::optional<std::string> load(const std::string& file) = 0;

  // Lets a feature parse its own configuration. Returns the configuration for the target, or
  // nothing if `written` does not cover it.
  virtual std::optional<Node> parse(FeatureId feature, const Node& written,
                                    const Target& target) = 0;

  // A routing call.
  virtual Answer ask(const RoutedUse& use, const Target& target, int64_t iteration) = 0;
};

// The output of messages.
class Sink {
 public:
  virtual ~Sink() = default;

  virtual void warn(const std::string& text) = 0;   // issues a warning in the user's program
  virtual void print(const std::string& line) = 0;  // writes a line to the terminal
};

}  // namespace te::inspect
