#include "bindings/inspect_calls.h"

#include <pybind11/stl.h>

#include <stdexcept>
#include <utility>

#include "bindings/inspect_node.h"
#include "core/error.h"
#include "inspect/registry.h"

namespace te::bindings {

namespace py = pybind11;

PythonCalls::~PythonCalls() {
  const py::gil_scoped_acquire gil;
  release();
}

void PythonCalls::release() {
  const auto routed = std::move(routed_);  // moved out first: destructors may run Python code
  const py::object calls = std::move(calls_);
  routed_.clear();
}

py::object PythonCalls::method(const char* name) const {
  require(static_cast<bool>(calls_), Kind::Runtime, "inspect",
          "expected a running session, got one that has ended");
  return calls_.attr(name);
}

std::optional<std::string> PythonCalls::load(const std::string& file) {
  const py::gil_scoped_acquire gil;
  return method("load")(file).cast<std::optional<std::string>>();
}

std::optional<inspect::Node> PythonCalls::parse(inspect::FeatureId feature,
                                                const inspect::Node& written,
                                                const inspect::Target& target) {
  const py::gil_scoped_acquire gil;
  const py::object parsed = method("parse")(feature, to_python(written), target.api, target.layer,
                                            target.tensor, target.gemm);
  if (parsed.is_none()) return std::nullopt;
  return from_python(parsed);
}

inspect::Answer PythonCalls::ask(const inspect::RoutedUse& use, const inspect::Target& target,
                                 int64_t iteration) {
  const py::gil_scoped_acquire gil;
  const py::object answer =
      method("ask")(routed(use), target.api, target.layer, target.tensor, target.gemm, iteration);
  const auto [yes, next] = answer.cast<std::pair<bool, std::optional<int64_t>>>();
  return {yes, next};
}

void PythonCalls::warn(const std::string& text) {
  const py::gil_scoped_acquire gil;
  method("warn")(text);
}

void PythonCalls::print(const std::string& line) {
  const py::gil_scoped_acquire gil;
  method("print")(line);
}

py::object PythonCalls::routed(const inspect::RoutedUse& use) {
  if (const auto found = routed_.find(&use); found != routed_.end()) return found->second;
  const py::object schedule = use.schedule ? py::cast(*use.schedule) : py::none();
  const py::object made = method("routed")(use.feature->id, use.feature->rule.name, use.section,
                                           to_python(use.config), schedule);
  return routed_.try_emplace(&use, made).first->second;
}

inspect::RegexSearch python_regex() {
  return [](const std::string& pattern, const std::string& text) {
    const py::gil_scoped_acquire gil;
    const py::module_ re = py::module_::import("re");
    const py::module_ patterns = py::module_::import("nvdlfw_inspect.patterns");
    try {
      return patterns.attr("search")(pattern, text).cast<bool>();
    } catch (const py::error_already_set& error) {
      if (!error.matches(re.attr("error"))) throw;
      throw std::invalid_argument(py::str(error.value()).cast<std::string>());
    }
  };
}

}  // namespace te::bindings
