// nvdlfw_inspect/_engine: the debug engine as Python sees it.
#include <pybind11/pybind11.h>

#include <string>
#include <string_view>

#include "bindings/errors.h"
#include "bindings/inspect_bindings.h"
#include "bindings/inspect_node.h"
#include "core/error.h"
#include "inspect/config_yaml.h"

namespace te::bindings {
namespace {

namespace py = pybind11;

py::object parse_yaml(const py::bytes& text, const std::string& origin) {
  try {
    return to_python(inspect::parse_yaml(std::string_view(text)));
  } catch (const inspect::TextError& error) {
    const std::string place =
        error.mark.line > 0 ? concat(origin, ":", error.mark.line, ":", error.mark.column) : origin;
    throw Error(Kind::Value, concat(place, ": ", error.what()));
  }
}

}  // namespace
}  // namespace te::bindings

PYBIND11_MODULE(_engine, m) {
  m.doc() = "Native engine of nvdlfw_inspect.";
  te::bindings::register_errors();
  te::bindings::bind_session(m);
  te::bindings::bind_engine(m);
  m.def("parse_yaml", &te::bindings::parse_yaml, pybind11::arg("text"), pybind11::arg("origin"),
        "Plain Python values of a YAML document, as the engine reads it. ValueError with file, "
        "line and column.");
}
