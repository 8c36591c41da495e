#include "inspect/config_path.h"

#include <utility>

namespace te::inspect {

ConfigPath ConfigPath::at(std::string_view key) const {
  ConfigPath inner = *this;
  if (!inner.path_.empty()) inner.path_ += '.';
  inner.path_ += key;
  return inner;
}

ConfigPath ConfigPath::at(size_t index) const {
  ConfigPath inner = *this;
  inner.path_.append("[").append(std::to_string(index)).append("]");
  return inner;
}

ConfigPath ConfigPath::as_warnings() const {
  ConfigPath inner = *this;
  inner.mistakes_ = Severity::Warning;
  return inner;
}

void ConfigPath::mistake(Mark mark, std::string message) const {
  problems_->push_back({mistakes_, mark, path_, std::move(message)});
}

void ConfigPath::warn(Mark mark, std::string message) const {
  problems_->push_back({Severity::Warning, mark, path_, std::move(message)});
}

std::vector<const Node*> as_list(const Node& node) {
  if (node.is_null()) return {};
  if (!node.is_sequence()) return {&node};
  std::vector<const Node*> items;
  for (const Node& item : node.as_sequence()) items.push_back(&item);
  return items;
}

std::vector<std::string> strings(const Node& node, const ConfigPath& path) {
  std::vector<std::string> found;
  size_t index = 0;
  for (const Node* item : as_list(node)) {
    if (item->is_string() && !item->as_string().empty()) {
      found.push_back(item->as_string());
    } else {
      path.at(index).mistake(item->mark, "expected a non-empty string, got " + brief(*item));
    }
    ++index;
  }
  return found;
}

void expect_keys(const Node& body, Mark at, const ConfigPath& path) {
  if (body.is_null()) {
    path.mistake(at, "expected keys in it, indented deeper than its name, got none");
  } else {
    path.mistake(body.mark.line > 0 ? body.mark : at, "expected a mapping, got " + brief(body));
  }
}

std::string key_text(const Node& key) { return key.is_string() ? key.as_string() : brief(key); }

}  // namespace te::inspect
