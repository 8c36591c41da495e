// Node: a value in the tree of a configuration, which is read from a YAML file or a Python dict. A
// node of a file has its line and column, for messages.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>
#include <utility>
#include <variant>
#include <vector>

namespace te::inspect {

// A place in a file. Lines and columns (in characters) count from 1; line 0: there is no file.
struct Mark {
  int line = 0;
  int column = 0;
};

class Node {
 public:
  using Sequence = std::vector<Node>;
  using Mapping = std::vector<std::pair<Node, Node>>;  // in file order; keys are unique scalars

  Mark mark = {};
  std::variant<std::monostate, bool, int64_t, double, std::string, Sequence, Mapping> value = {};

  bool is_null() const { return holds<std::monostate>(); }
  bool is_bool() const { return holds<bool>(); }
  bool is_int() const { return holds<int64_t>(); }
  bool is_double() const { return holds<double>(); }
  bool is_string() const { return holds<std::string>(); }
  bool is_sequence() const { return holds<Sequence>(); }
  bool is_mapping() const { return holds<Mapping>(); }
  bool is_scalar() const { return !is_sequence() && !is_mapping(); }

  // These throw std::bad_variant_access if the node has another type.
  bool as_bool() const { return std::get<bool>(value); }
  int64_t as_int() const { return std::get<int64_t>(value); }
  double as_double() const { return std::get<double>(value); }
  const std::string& as_string() const { return std::get<std::string>(value); }
  const Sequence& as_sequence() const { return std::get<Sequence>(value); }
  const Mapping& as_mapping() const { return std::get<Mapping>(value); }
  Sequence& as_sequence() { return std::get<Sequence>(value); }
  Mapping& as_mapping() { return std::get<Mapping>(value); }

  // The value of a string key; nullptr if there is none, or if the node is not a mapping.
  const Node* find(std::string_view key) const;
  // Replaces the value under a string key of a mapping, or appends the pair.
  void set(std::string_view key, Node node);
  // Removes a string key of a mapping, if it exists.
  void erase(std::string_view key);

 private:
  template <class T>
  bool holds() const {
    return std::holds_alternative<T>(value);
  }
};

// The shortest text that reads back as the same finite number: 2.0, 0.1, 1e+22.
std::string shortest(double value);

// The node on one line, shortened to about forty characters, for messages.
std::string brief(const Node& node);

// FNV-1a hash of types and values, but not of places in the file. Equal trees have equal hashes on
// every rank and platform.
uint64_t content_hash(const Node& node);

}  // namespace te::inspect
