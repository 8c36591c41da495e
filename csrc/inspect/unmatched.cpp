#include "inspect/unmatched.h"

#include <algorithm>
#include <cctype>
#include <climits>

#include "core/error.h"

namespace te::inspect {

namespace {

constexpr const char* kNoLayer =
    "; no layer of transformer_engine.pytorch has run yet: te.convert(model) replaces torch's "
    "layers";

std::string join(const std::vector<std::string>& parts) {
  std::string text;
  for (const std::string& part : parts) text += (text.empty() ? "" : ", ") + part;
  return text;
}

// The fewest edits that turn `text` into some part of `name`.
size_t distance_to_part(std::string_view text, std::string_view name) {
  std::vector<size_t> row(name.size() + 1, 0);  // a part may begin anywhere
  for (size_t i = 1; i <= text.size(); ++i) {
    size_t diagonal = row[0];
    row[0] = i;
    for (size_t j = 1; j <= name.size(); ++j) {
      const bool same = std::tolower(static_cast<unsigned char>(text[i - 1])) ==
                        std::tolower(static_cast<unsigned char>(name[j - 1]));
      const size_t replaced = diagonal + (same ? 0 : 1);
      diagonal = row[j];
      row[j] = std::min({replaced, row[j] + 1, row[j - 1] + 1});
    }
  }
  return *std::ranges::min_element(row);
}

std::vector<std::string> wanted(const Selector& selector) {
  if (!selector.exact_layer_names.empty()) return selector.exact_layer_names;
  if (selector.layer_name_regex_pattern) return {*selector.layer_name_regex_pattern};
  return selector.layer_types.value_or(std::vector<std::string>{});
}

std::string describe_numbers(const std::vector<std::pair<int, int>>& numbers) {
  std::vector<std::string> ranges;
  for (const auto& [low, high] : numbers) {
    ranges.push_back(high == INT_MAX ? "all"
                     : low == high   ? std::to_string(low)
                                     : concat(low, "-", high));
  }
  return concat("layer_numbers [", join(ranges), "]");
}

}  // namespace

std::string describe(const Selector& selector) {
  std::vector<std::string> parts;
  if (!selector.exact_layer_names.empty()) {
    parts.push_back(concat("exact_layer_names [", join(selector.exact_layer_names), "]"));
  }
  if (selector.layer_name_regex_pattern) {
    parts.push_back("layer_name_regex_pattern " + *selector.layer_name_regex_pattern);
  }
  if (selector.layer_types)
    parts.push_back(concat("layer_types [", join(*selector.layer_types), "]"));
  if (selector.layer_numbers) parts.push_back(describe_numbers(*selector.layer_numbers));
  return join(parts);
}

std::vector<std::string> near_misses(std::string_view text,
                                     const std::vector<std::string>& layers) {
  std::vector<std::pair<size_t, std::string>> ranked;
  for (const std::string& layer : layers) {
    const size_t distance = distance_to_part(text, layer);
    if (distance <= text.size() / 2) ranked.emplace_back(distance, layer);
  }
  std::ranges::stable_sort(ranked, {}, &std::pair<size_t, std::string>::first);
  std::vector<std::string> best;
  for (size_t i = 0; i < std::min<size_t>(3, ranked.size()); ++i) best.push_back(ranked[i].second);
  return best;
}

std::string explain_unmatched(const Section& section, const std::vector<std::string>& layers) {
  const std::string head = concat("[config] section ", section.name, ": ",
                                  describe(section.selector), " selects no layer");
  if (layers.empty()) return head + kNoLayer;
  std::vector<std::string> close;
  for (const std::string& text : wanted(section.selector)) {
    for (const std::string& layer : near_misses(text, layers)) {
      if (std::ranges::find(close, layer) == close.end()) close.push_back(layer);
    }
  }
  if (!close.empty()) return concat(head, "; did you mean ", join(close), "?");
  const std::vector<std::string> some(layers.begin(),
                                      layers.begin() + std::min<ptrdiff_t>(5, std::ssize(layers)));
  return concat(head, " among ", layers.size(), layers.size() == 1 ? " layer" : " layers",
                ", such as ", join(some));
}

}  // namespace te::inspect
