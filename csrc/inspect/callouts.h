// Interfaces by which the engine calls features and prints messages. The bindings implement them,
// tests use fakes. They may be called on any thread, never while the engine holds its mutex.
#pragma once

#include <cstdint>
#include <optional>
#include <string>

#include "inspect/node.h"

namespace te::inspect {

using FeatureId = int;

// What a call is about: the namespace and its method, the layer, and the tensor and gemm if it has
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
  std::optional<int64_t> next;  // the iteration at which it may change; none: never

  bool operator==(const Answer&) const = default;
};

struct RoutedUse;

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

class Sink {
 public:
  virtual ~Sink() = default;

  virtual void warn(const std::string& text) = 0;   // for the user's program
  virtual void print(const std::string& line) = 0;  // for the terminal
};

}  // namespace te::inspect
