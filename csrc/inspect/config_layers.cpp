#include "inspect/config_layers.h"

#include <charconv>
#include <stdexcept>
#include <utility>

#include "inspect/suggest.h"

namespace te::inspect {
namespace {

const std::vector<std::string> kSelectors = {"exact_layer_names", "layer_name_regex_pattern",
                                             "layer_types", "layer_numbers"};

void read_pattern(const Node& node, const ConfigPath& path, const RegexSearch& regex,
                  Selector& selector) {
  if (!node.is_string() || node.as_string().empty()) {
    path.mistake(node.mark, "expected a non-empty regular expression, got " + brief(node));
    return;
  }
  try {
    regex(node.as_string(), "");
    selector.layer_name_regex_pattern = node.as_string();
  } catch (const std::invalid_argument& error) {
    path.mistake(node.mark, "expected a regular expression of Python, got " + brief(node) + ": " +
                                error.what());
  }
}

std::optional<int> take_number(std::string_view& text) {
  int number = 0;
  const auto parsed = std::from_chars(text.data(), text.data() + text.size(), number);
  if (parsed.ec != std::errc() || text.starts_with('-')) return std::nullopt;
  text.remove_prefix(static_cast<size_t>(parsed.ptr - text.data()));
  return number;
}

// Reads 3, "3", "3-7" or "all". Returns nothing for other values.
std::optional<std::pair<int, int>> read_range(const Node& node) {
  if (node.is_int()) {
    const int64_t number = node.as_int();
    if (number < 0 || number >= Selector::kEveryNumber) return std::nullopt;
    return std::pair(static_cast<int>(number), static_cast<int>(number));
  }
  if (!node.is_string()) return std::nullopt;
  std::string_view text = node.as_string();
  if (text == "all") return std::pair(0, Selector::kEveryNumber);
  const std::optional<int> first = take_number(text);
  if (first && text.empty()) return std::pair(*first, *first);
  if (!first || !text.starts_with('-')) return std::nullopt;
  text.remove_prefix(1);
  const std::optional<int> last = take_number(text);
  if (!last || !text.empty() || *last < *first) return std::nullopt;
  return std::pair(*first, *last);
}

void read_numbers(const Node& node, const ConfigPath& path, Selector& selector) {
  selector.layer_numbers.emplace();
  size_t index = 0;
  for (const Node* item : as_list(node)) {
    if (const auto range = read_range(*item)) {
      selector.layer_numbers->push_back(*range);
    } else {
      path.at(index).mistake(
          item->mark, "expected a number, a range like '2-5', or 'all', got " + brief(*item));
    }
    ++index;
  }
}

// Warns about selectors that are ignored: exact names hide all others, and a pattern hides types
// and numbers.
void warn_of_ignored(const Node& layers, const ConfigPath& path) {
  const bool exact = layers.find(kSelectors[0]), pattern = layers.find(kSelectors[1]);
  for (size_t i = 1; i < kSelectors.size(); ++i) {
    const Node* ignored = layers.find(kSelectors[i]);
    if (ignored && (exact || (pattern && i > 1))) {
      path.at(kSelectors[i])
          .warn(ignored->mark, "expected nothing beside " + kSelectors[exact ? 0 : 1] +
                                   ", which decides alone: ignored");
    }
  }
}

}  // namespace

Selector read_selector(const Node& layers, const ConfigPath& path, const RegexSearch& regex) {
  Selector selector;
  if (!layers.is_mapping() || layers.as_mapping().empty()) {
    path.mistake(layers.mark,
                 "expected at least one of exact_layer_names, layer_name_regex_pattern, "
                 "layer_types, layer_numbers, got " +
                     brief(layers));
    return selector;
  }
  for (const auto& [key, node] : layers.as_mapping()) {
    const std::string name = key_text(key);
    const ConfigPath inner = path.at(name);
    if (name == "exact_layer_names") {
      selector.exact_layer_names = strings(node, inner);
      if (as_list(node).empty()) {
        inner.mistake(node.mark, "expected at least one name, got " + brief(node));
      }
    } else if (name == "layer_name_regex_pattern") {
      read_pattern(node, inner, regex, selector);
    } else if (node.is_null() && (name == "layer_types" || name == "layer_numbers")) {
      inner.mistake(key.mark, "expected at least one value, got none");
    } else if (name == "layer_types") {
      selector.layer_types = strings(node, inner);
      if (as_list(node).empty()) {
        inner.warn(node.mark, "expected at least one word, got []: selects every layer");
      }
    } else if (name == "layer_numbers") {
      read_numbers(node, inner, selector);
    } else {
      inner.mistake(key.mark, expected_one_of(kSelectors, name));
    }
  }
  warn_of_ignored(layers, path);
  return selector;
}

}  // namespace te::inspect
