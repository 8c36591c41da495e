// ConfigPath: the place in a configuration that is being checked ("section.namespace.feature.key"),
// and the list to which the problems found there are added.
#pragma once

#include <string>
#include <string_view>
#include <vector>

#include "inspect/config.h"

namespace te::inspect {

class ConfigPath {
 public:
  // `mistakes` is the severity that mistake() reports.
  ConfigPath(std::vector<Problem>& problems, Severity mistakes)
      : problems_(&problems), mistakes_(mistakes) {}

  ConfigPath at(std::string_view key) const;
  ConfigPath at(size_t index) const;
  ConfigPath as_warnings() const;  // the same path, with mistakes as warnings

  const std::string& path() const { return path_; }
  void mistake(Mark mark, std::string message) const;
  void warn(Mark mark, std::string message) const;

 private:
  std::vector<Problem>* problems_;
  Severity mistakes_;
  std::string path_ = {};
};

// Pointers to the items of a list. A single value is a list of one item, and null an empty list.
std::vector<const Node*> as_list(const Node& node);

// The strings of as_list(node); reports other items, and empty strings, as problems.
std::vector<std::string> strings(const Node& node, const ConfigPath& path);

// Reports that a value is not a mapping. A null value is reported at its key, `at`, with a hint
// about indentation: the keys that belong into it probably follow without being indented.
void expect_keys(const Node& body, Mark at, const ConfigPath& path);

// The text of a scalar key of any type.
std::string key_text(const Node& key);

}  // namespace te::inspect
