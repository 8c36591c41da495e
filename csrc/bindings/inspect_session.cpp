// Bindings of a session: the routing calls of hooks, and the logs. The GIL is released before calls
// that may lock a mutex of the engine.
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "bindings/inspect_bindings.h"
#include "bindings/inspect_calls.h"
#include "bindings/inspect_node.h"
#include "core/error.h"
#include "inspect/session.h"

namespace te::bindings {
namespace {

// A str argument. For a wrong type, the error says that a layer's name was expected. (For other
// arguments, pybind11 lists the signatures.)
struct LayerName : std::string {};

}  // namespace
}  // namespace te::bindings

namespace pybind11::detail {

template <>
struct type_caster<te::bindings::LayerName> {
  PYBIND11_TYPE_CASTER(te::bindings::LayerName, const_name("str"));

  bool load(handle source, bool) {
    value.assign(te::bindings::text_of(source, "inspect", "as the name of a layer"));
    return true;
  }
};

}  // namespace pybind11::detail

namespace te::bindings {
namespace {

namespace py = pybind11;
using inspect::RoutedUse;
using inspect::Session;
using inspect::Target;
using Name = std::optional<std::string>;

PythonCalls& calls_of(const Session& session) {
  return static_cast<PythonCalls&>(session.features());
}

py::tuple to_tuple(const Session& session, const std::vector<const RoutedUse*>& uses) {
  py::tuple result(uses.size());
  for (size_t i = 0; i < uses.size(); ++i) result[i] = calls_of(session).routed(*uses[i]);
  return result;
}

py::tuple route(Session& session, std::string ns, std::string api, LayerName layer, Name tensor,
                Name gemm) {
  std::vector<const RoutedUse*> uses;
  {
    const py::gil_scoped_release released;
    const auto route = session.route(
        {std::move(ns), std::move(api), std::move(layer), std::move(tensor), std::move(gemm)});
    for (const RoutedUse& use : *route) uses.push_back(&use);
  }
  return to_tuple(session, uses);
}

py::tuple active(Session& session, int64_t iteration, std::string ns, std::string api,
                 LayerName layer, Name tensor, Name gemm) {
  std::vector<const RoutedUse*> uses;
  {
    const py::gil_scoped_release released;
    uses = session.active(
        {std::move(ns), std::move(api), std::move(layer), std::move(tensor), std::move(gemm)},
        iteration);
  }
  return to_tuple(session, uses);
}

std::pair<bool, std::optional<int64_t>> decide(Session& session, int64_t iteration, std::string ns,
                                               std::string api, LayerName layer, Name tensor,
                                               Name gemm) {
  const auto decision = session.decide(
      {std::move(ns), std::move(api), std::move(layer), std::move(tensor), std::move(gemm)},
      iteration);
  return {decision->yes, decision->next};
}

void log_statistics(Session& session, int64_t iteration, const LayerName& layer,
                    const std::string& tensor,
                    const std::vector<std::pair<std::string, std::optional<double>>>& values) {
  for (const auto& [statistic, value] : values) {
    session.log_statistic(
        {iteration, layer, tensor, statistic, layer + "_" + tensor + "_" + statistic, value});
  }
}

// Returns {namespace: {feature: configuration}} for the sections that select the layer, in file
// order. If several sections have a feature, the first one counts.
py::dict written(Session& session, const LayerName& layer) {
  std::vector<int> sections;
  {
    const py::gil_scoped_release released;
    sections = session.sections_of(layer);
  }
  py::dict result;
  for (const int section : sections) {
    for (const inspect::FeatureUse& use : session.config().sections[section].uses) {
      const py::str ns(use.ns);
      if (!result.contains(ns)) result[ns] = py::dict();
      py::dict features = result[ns];
      const py::str name(use.feature);
      if (!features.contains(name)) features[name] = to_python(use.body);
    }
  }
  return result;
}

// Returns whether the `layers` part of a section selects the layer.
bool selects(const py::dict& layers, const std::string& layer) {
  py::dict section, root;
  section["enabled"] = true;
  section["layers"] = layers;
  root["layers"] = section;
  const auto [config, problems] =
      inspect::load_config(from_python(root), "<dict>", {}, python_regex());
  for (const inspect::Problem& problem : problems) {
    if (problem.severity == inspect::Severity::Error)
      fail(Kind::Value, "config", describe(problem, config.origin));
  }
  return config.sections.at(0).selector.matches(layer, python_regex());
}

}  // namespace

void bind_session(py::module_& m) {
  py::class_<inspect::Schedule>(m, "Schedule")
      .def_readonly("freq", &inspect::Schedule::freq)
      .def_readonly("intervals", &inspect::Schedule::intervals)
      .def("due", &inspect::Schedule::due, py::arg("iteration"))
      .def("next", &inspect::Schedule::next, py::arg("iteration"));

  m.def(
      "schedule_of",
      [](const py::dict& config) { return inspect::schedule_of(from_python(config)); },
      py::arg("config"));
  m.def("selects", &selects, py::arg("layers"), py::arg("layer"));

  const py::call_guard<py::gil_scoped_release> released;
  py::class_<Session, std::shared_ptr<Session>>(m, "Session")
      .def_property_readonly("epoch", &Session::epoch)
      .def_property("iteration", &Session::iteration, &Session::set_iteration)
      .def("route", &route)
      .def("active", &active)
      .def("decide", &decide, released)
      .def("written", &written)
      .def("layers", &Session::layers, released)
      .def("log_message", &Session::log_message, released)
      .def("log_statistics", &log_statistics, released)
      .def(
          "log_scalar",
          [](Session& session, const std::string& name, double value, int64_t iteration) {
            session.log_statistic({iteration, "", "", "", name, value});
          },
          released)
      .def("advance", &Session::advance)
      .def("settle", &Session::settle, released)
      .def("flush", &Session::flush, released)
      .def("finish", &Session::finish, released)
      .def("release", [](Session& session) { calls_of(session).release(); });
}

}  // namespace te::bindings
