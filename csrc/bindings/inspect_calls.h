// The interfaces that the engine calls (inspect/callouts.h), implemented by Python: an object of
// nvdlfw_inspect/calls.py for features, `warnings` and stderr for the sink, `re` for patterns. The
// engine calls them without the GIL, and they take it.
#pragma once

#include <pybind11/pybind11.h>

#include <memory>
#include <string>
#include <unordered_map>

#include "inspect/callouts.h"
#include "inspect/routing.h"
#include "inspect/selector.h"

namespace te::bindings {

class PythonCalls final : public inspect::FeatureCall, public inspect::Sink {
 public:
  explicit PythonCalls(pybind11::object calls) : calls_(std::move(calls)) {}
  ~PythonCalls() override;

  std::optional<std::string> load(const std::string& file) override;
  std::optional<inspect::Node> parse(inspect::FeatureId feature, const inspect::Node& written,
                                     const inspect::Target& target) override;
  inspect::Answer ask(const inspect::RoutedUse& use, const inspect::Target& target,
                      int64_t iteration) override;
  void warn(const std::string& text) override;
  void print(const std::string& line) override;

  // To be called with the GIL held.
  pybind11::object routed(const inspect::RoutedUse& use);  // the Python object of a use
  void release();  // drops all Python objects; later calls throw

 private:
  pybind11::object method(const char* name) const;

  pybind11::object calls_;
  std::unordered_map<const inspect::RoutedUse*, pybind11::object> routed_;  // the GIL guards it
};

// Python's re.search. Throws std::invalid_argument for a bad pattern.
inspect::RegexSearch python_regex();

}  // namespace te::bindings
