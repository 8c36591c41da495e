#include "bindings/inspect_node.h"

#include <string>

#include "core/error.h"

namespace te::bindings {

namespace py = pybind11;
using inspect::Node;

namespace {

constexpr int kMaxDepth = 32;

struct ToPython {
  py::object operator()(std::monostate) const { return py::none(); }
  py::object operator()(bool value) const { return py::bool_(value); }
  py::object operator()(int64_t value) const { return py::int_(value); }
  py::object operator()(double value) const { return py::float_(value); }
  py::object operator()(const std::string& value) const { return py::str(value); }
  py::object operator()(const Node::Sequence& items) const {
    py::list list;
    for (const Node& item : items) list.append(to_python(item));
    return list;
  }
  py::object operator()(const Node::Mapping& items) const {
    py::dict dict;
    for (const auto& [key, item] : items) dict[to_python(key)] = to_python(item);
    return dict;
  }
};

std::string place(const std::string& path) { return path.empty() ? "the configuration" : path; }

std::string text_at(const py::handle& value, const std::string& path) {
  return text_of(value, "config", concat("at ", place(path)));
}

int64_t integer(const py::handle& value, const std::string& path) {
  int overflow = 0;
  const long long converted = PyLong_AsLongLongAndOverflow(value.ptr(), &overflow);
  if (overflow != 0)
    fail(Kind::Value, "config", "expected an integer of at most 64 bits at ", place(path), ", got ",
         py::str(value).cast<std::string>());
  return converted;
}

[[noreturn]] void refuse(const py::handle& value, const std::string& path) {
  fail(Kind::Type, "config", "expected a dict, list, str, bool, int, float or None at ",
       place(path), ", got ", py::str(py::type::handle_of(value)).cast<std::string>());
}

Node convert(const py::handle& value, const std::string& path, int depth) {
  if (depth > kMaxDepth)
    fail(Kind::Value, "config", "expected at most ", kMaxDepth, " levels at ", place(path),
         ", got more");
  Node node;
  if (value.is_none()) return node;
  if (py::isinstance<py::bool_>(value)) {
    node.value = value.cast<bool>();
  } else if (py::isinstance<py::int_>(value)) {
    node.value = integer(value, path);
  } else if (py::isinstance<py::float_>(value)) {
    node.value = value.cast<double>();
  } else if (py::isinstance<py::str>(value)) {
    node.value = text_at(value, path);
  } else if (py::isinstance<py::dict>(value)) {
    Node::Mapping items;
    for (const auto& [key, item] : py::reinterpret_borrow<py::dict>(value)) {
      const std::string inner = (path.empty() ? "" : path + ".") + text_at(py::str(key), path);
      Node name = convert(key, inner, depth + 1);
      if (!name.is_scalar()) fail(Kind::Type, "config", "expected a plain value as key at ", inner);
      items.emplace_back(std::move(name), convert(item, inner, depth + 1));
    }
    node.value = std::move(items);
  } else if (PyIndex_Check(value.ptr())) {  // an integer of another library, such as numpy
    const auto converted = py::reinterpret_steal<py::object>(PyNumber_Index(value.ptr()));
    if (!converted) {  // such as a tensor of several elements
      PyErr_Clear();
      refuse(value, path);
    }
    node.value = integer(converted, path);
  } else if (py::isinstance<py::list>(value) || py::isinstance<py::tuple>(value) ||
             Py_IS_TYPE(value.ptr(), &PyRange_Type)) {
    Node::Sequence items;
    for (const auto& item : value)
      items.push_back(convert(item, path + "[" + std::to_string(items.size()) + "]", depth + 1));
    node.value = std::move(items);
  } else if (py::hasattr(value, "__fspath__")) {
    node.value = text_at(py::str(value.attr("__fspath__")()), path);
  } else {
    refuse(value, path);
  }
  return node;
}

}  // namespace

std::string text_of(const py::handle& value, std::string_view op, std::string_view where) {
  Py_ssize_t size = 0;
  const bool is_text = py::isinstance<py::str>(value);
  const char* text = is_text ? PyUnicode_AsUTF8AndSize(value.ptr(), &size) : nullptr;
  if (text != nullptr) return {text, static_cast<size_t>(size)};
  PyErr_Clear();
  fail(is_text ? Kind::Value : Kind::Type, op, "expected text of whole characters ", where,
       ", got ", py::repr(value).attr("encode")("utf-8", "backslashreplace").cast<std::string>());
}

py::object to_python(const Node& node) { return std::visit(ToPython(), node.value); }

Node from_python(const py::handle& value, const std::string& path) {
  return convert(value, path, 0);
}

}  // namespace te::bindings
