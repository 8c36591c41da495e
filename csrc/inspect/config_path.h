// The place in a configuration that is being checked, and the problems found there.
#pragma once

#include <string>
#include <string_view>
#include <vector>

#include "inspect/config.h"

namespace te::inspect {

class ConfigPath {
 public:
  ConfigPath(std::vector<Problem>& problems, Severity mistakes)
      : problems_(&problems), mistakes_(mistakes) {}

  ConfigPath at(std::string_view key) const;
  ConfigPath at(size_t index) const;
  ConfigPath as_warnings() const;  // the same path; its problems are warnings

  const std::string& path() const { return path_; }
  void mistake(Mark mark, std::string message) const;
  void warn(Mark mark, std::string message) const;

 private:
  std::vector<Problem>* problems_;
  Severity mistakes_;
  std::string path_ = {};
};

// The items of a list. A single value is a list of one, and null an empty list. Points into `node`.
std::vector<const Node*> as_list(const Node& node);

// The strings of as_list(node); reports other items as problems.
std::vector<std::string> strings(const Node& node, const ConfigPath& path);

// Reports that a value is no mapping. A null value is reported at its key, `at`: the keys that
// should be in it may stand beside it because they are not indented.
void expect_keys(const Node& body, Mark at, const ConfigPath& path);

// The text of a scalar key of any type.
std::string key_text(const Node& key);

}  // namespace te::inspect
