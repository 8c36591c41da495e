// Where in a configuration a check is, and what it has to say.
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
  ConfigPath as_warnings() const;  // the same path, where mistakes do not matter

  const std::string& path() const { return path_; }
  void mistake(Mark mark, std::string message) const;
  void warn(Mark mark, std::string message) const;

 private:
  std::vector<Problem>* problems_;
  Severity mistakes_;
  std::string path_ = {};
};

// A list, or a single value in place of a list of one; for null an empty list. Pointers into
// `node`.
std::vector<const Node*> as_list(const Node& node);

// The strings among as_list(node); anything else is a mistake.
std::vector<std::string> strings(const Node& node, const ConfigPath& path);

// The mistake that a mapping is not one. A key without a value is told at the key, `at`: its own
// keys may stand beside it for want of indentation.
void expect_keys(const Node& body, Mark at, const ConfigPath& path);

// The text of a key, whatever scalar it is.
std::string key_text(const Node& key);

}  // namespace te::inspect
