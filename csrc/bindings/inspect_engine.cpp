// The process-wide registry of features, and the beginning of sessions.
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>
#include <pybind11/stl/filesystem.h>

#include <filesystem>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include "bindings/inspect_bindings.h"
#include "bindings/inspect_calls.h"
#include "bindings/inspect_node.h"
#include "inspect/discovery.h"
#include "inspect/engine.h"
#include "inspect/plan.h"

namespace te::bindings {
namespace {

namespace py = pybind11;
using inspect::Engine;

// A configuration and the features that it was read for.
struct LoadedConfig {
  inspect::Loaded loaded;
  inspect::Registry registry;

  std::vector<std::string> problems(inspect::Severity severity) const {
    std::vector<std::string> texts;
    for (const inspect::Problem& problem : loaded.problems) {
      if (problem.severity == severity) texts.push_back(describe(problem, loaded.config.origin));
    }
    return texts;
  }
};

// Returns (section, feature, layers, [(gemm, tensor, schedule), ...]) for every enabled feature, in
// file order.
py::list plan_of(const LoadedConfig& config, const std::vector<std::string>& layers) {
  py::list rows;
  for (const inspect::Plan& plan :
       inspect::plans(config.loaded.config, config.registry.rules(), layers, python_regex())) {
    py::list targets;
    for (const auto& [gemm, tensor, schedule] : plan.targets) {
      targets.append(py::make_tuple(gemm, tensor, schedule));
    }
    rows.append(py::make_tuple(plan.section, plan.feature, plan.layers, targets));
  }
  return rows;
}

LoadedConfig load(const Engine& engine, const py::object& source, std::string origin) {
  const inspect::RegexSearch regex = python_regex();
  LoadedConfig result{{}, engine.registry()};
  const auto rules = result.registry.rules();
  if (py::isinstance<py::bytes>(source)) {
    const std::string text = source.cast<std::string>();
    const py::gil_scoped_release released;
    result.loaded = inspect::load_config(text, std::move(origin), rules, regex);
  } else {
    const inspect::Node root = from_python(source);
    const py::gil_scoped_release released;
    result.loaded = inspect::load_config(root, std::move(origin), rules, regex);
  }
  return result;
}

std::shared_ptr<inspect::Session> begin(Engine& engine, const LoadedConfig& config,
                                        std::shared_ptr<PythonCalls> calls,
                                        inspect::LogOptions log) {
  return engine.begin(config.loaded.config, config.registry, {python_regex(), calls, calls},
                      std::move(log));
}

std::vector<std::pair<std::string, std::string>> discover(
    const std::vector<std::string>& directories, PythonCalls& calls) {
  std::vector<std::pair<std::string, std::string>> broken;
  for (auto& file : inspect::discover(directories, calls))
    broken.emplace_back(file.path, file.reason);
  return broken;
}

using Bound = std::optional<int64_t>;
using Key = std::tuple<std::string, std::string, std::vector<std::string>, bool, Bound, Bound>;
using Keys = std::vector<Key>;

std::vector<inspect::KeyRule> key_rules(const Keys& keys) {
  std::vector<inspect::KeyRule> rules;
  for (const auto& [name, kind, choices, required, at_least, at_most] : keys) {
    rules.push_back({name, kind, choices, required, at_least, at_most});
  }
  return rules;
}

inspect::FeatureRule rule_of(const py::dict& described) {
  const auto get = [&](const char* key, auto fallback) {
    return described.contains(key) ? described[key].cast<decltype(fallback)>() : fallback;
  };
  using Names = std::vector<std::string>;
  inspect::FeatureRule rule;
  rule.ns = get("namespace", std::string());
  rule.name = get("name", std::string());
  rule.free_form = get("free_form", true);
  rule.aliases = get("aliases", Names());
  rule.statistics = get("statistics", Names());
  rule.any_case = get("any_case", false);
  rule.tensors = get("tensors", Names());
  rule.any_tensors = get("any_tensors", false);
  rule.conflicts = get("conflicts", Names());
  rule.takes_gemms = get("gemms", false);
  rule.scheduled = get("scheduled", false);
  rule.keys = key_rules(get("keys", Keys()));
  for (const auto& [name, keys] : get("statistic_keys", std::map<std::string, Keys>())) {
    rule.statistic_keys.emplace(name, key_rules(keys));
  }
  return rule;
}

inspect::Parsing parsing_of(const std::string& name) {
  if (name == "engine") return inspect::Parsing::Engine;
  return name == "feature" ? inspect::Parsing::Feature : inspect::Parsing::Nobody;
}

std::optional<inspect::FeatureId> add(Engine& engine, const py::dict& described,
                                      std::set<std::string> apis, const std::string& parsing,
                                      std::string origin) {
  inspect::Feature feature{0, rule_of(described), {}, parsing_of(parsing), std::move(origin)};
  feature.apis.insert(apis.begin(), apis.end());
  return engine.add(std::move(feature));
}

}  // namespace

void bind_engine(py::module_& m) {
  py::class_<inspect::LogOptions>(m, "LogOptions")
      .def(py::init([](const std::filesystem::path& directory, bool statistics, int rank,
                       std::string stamp, bool append_text, bool append_rows, bool timestamps,
                       int level) {
             return inspect::LogOptions{directory.string(), statistics,  rank,
                                        std::move(stamp),   append_text, append_rows,
                                        timestamps,         level};
           }),
           py::kw_only(), py::arg("directory"), py::arg("statistics") = true, py::arg("rank"),
           py::arg("stamp"), py::arg("append_text"), py::arg("append_rows"), py::arg("timestamps"),
           py::arg("level"));

  py::class_<LoadedConfig>(m, "LoadedConfig")
      .def_property_readonly("names", [](const LoadedConfig& c) { return c.loaded.config.names(); })
      .def_property_readonly("hash", [](const LoadedConfig& c) { return c.loaded.config.hash; })
      .def("plans", &plan_of, py::arg("layers"))
      .def_property_readonly(
          "errors", [](const LoadedConfig& c) { return c.problems(inspect::Severity::Error); })
      .def_property_readonly(
          "warnings", [](const LoadedConfig& c) { return c.problems(inspect::Severity::Warning); });

  py::class_<PythonCalls, std::shared_ptr<PythonCalls>>(m, "Callouts").def(py::init<py::object>());

  py::class_<Engine>(m, "Engine")
      .def(py::init<>())
      .def("add", &add, py::arg("rule"), py::arg("apis"), py::arg("parsing"), py::arg("origin"))
      .def("remove", &Engine::remove, py::arg("id"))
      .def(
          "discover",
          [](Engine&, const std::vector<std::string>& directories, PythonCalls& calls) {
            return discover(directories, calls);
          },
          py::arg("directories"), py::arg("calls"), py::call_guard<py::gil_scoped_release>())
      .def("load", &load, py::arg("source"), py::arg("origin"))
      .def("begin", &begin, py::arg("config"), py::arg("calls"), py::arg("log"),
           py::call_guard<py::gil_scoped_release>());
}

}  // namespace te::bindings
