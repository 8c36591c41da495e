#include "inspect/selector.h"

#include <algorithm>
#include <charconv>
#include <ranges>
#include <system_error>

#include "inspect/digit.h"

namespace te::inspect {
namespace {

constexpr std::pair<std::string_view, std::string_view> kAliases[] = {
    {"self_attention", "self_attn"}, {"layernorm_qkv", "layernorm_linear_qkv"},
    {"qkv", "linear_qkv"},           {"layernorm_query", "layernorm_linear_q"},
    {"query", "linear_q"},           {"key_value", "linear_kv"},
};
constexpr int kMostAliased = 8;

std::string_view alias_of(std::string_view component) {
  const auto* found =
      std::ranges::find(kAliases, component, &std::pair<std::string_view, std::string_view>::first);
  return found == std::end(kAliases) ? std::string_view() : found->second;
}

// Whether a pattern has a negative lookahead or lookbehind.
bool may_exclude(std::string_view pattern) {
  return pattern.find("(?!") != pattern.npos || pattern.find("(?<!") != pattern.npos;
}

// Whether a pattern contains the part of an alias that no layer's own name has: `self_attn`, or the
// alias up to `linear`.
bool spells(std::string_view pattern, std::string_view alias) {
  constexpr std::string_view kLinear = "linear";
  const size_t linear = alias.find(kLinear);
  if (linear != alias.npos) alias = alias.substr(0, linear + kLinear.size());
  return pattern.find(alias) != pattern.npos;
}

std::optional<int> layer_number(std::string_view layer) {
  std::optional<int> number;
  for (size_t begin = 0; begin < layer.size();) {
    size_t end = begin;
    while (end < layer.size() && is_digit(layer[end])) ++end;
    if (end == begin) {
      ++begin;
      continue;
    }
    const std::string_view before = layer.substr(0, begin);
    if (!before.ends_with("fc") && !before.ends_with("gemm_")) {
      int value = 0;
      const auto parsed = std::from_chars(layer.data() + begin, layer.data() + end, value);
      if (number || parsed.ec != std::errc()) return std::nullopt;
      number = value;
    }
    begin = end;
  }
  return number;
}

bool type_matches(const std::vector<std::string>& types, const std::vector<std::string>& names) {
  return types.empty() || std::ranges::any_of(types, [&](const std::string& type) {
           return type == "all" || std::ranges::any_of(names, [&](const std::string& name) {
                    return name.find(type) != name.npos;
                  });
         });
}

bool number_matches(const std::vector<std::pair<int, int>>& ranges, std::string_view layer) {
  const auto holds = [&](int number) {
    return std::ranges::any_of(
        ranges, [&](const auto& r) { return r.first <= number && number <= r.second; });
  };
  if (std::ranges::find(ranges, std::pair(0, Selector::kEveryNumber)) != ranges.end()) return true;
  const std::optional<int> number = layer_number(layer);
  return number && holds(*number);
}

}  // namespace

std::vector<std::string> names_of_layer(std::string_view layer,
                                        std::optional<std::string_view> pattern) {
  std::vector<std::string> names = {""};
  int aliased = 0;
  for (size_t begin = 0; begin <= layer.size();) {
    const size_t end = std::min(layer.find('.', begin), layer.size());
    const std::string_view component = layer.substr(begin, end - begin);
    std::string_view alias = aliased < kMostAliased ? alias_of(component) : std::string_view();
    if (pattern && !spells(*pattern, alias)) alias = {};
    const size_t count = names.size();
    for (size_t i = 0; i < count; ++i) {
      if (begin > 0) names[i] += '.';
      if (!alias.empty()) names.push_back(names[i] + std::string(alias));
      names[i] += component;
    }
    aliased += !alias.empty();
    begin = end + 1;
  }
  return names;
}

bool Selector::matches(std::string_view layer, const RegexSearch& regex) const {
  const bool by_pattern = exact_layer_names.empty() && layer_name_regex_pattern;
  const std::vector<std::string> names = by_pattern && may_exclude(*layer_name_regex_pattern)
                                             ? names_of_layer(layer, *layer_name_regex_pattern)
                                             : names_of_layer(layer);
  const auto any_name = [&](const auto& test) { return std::ranges::any_of(names, test); };
  if (!exact_layer_names.empty()) {
    return any_name([&](const std::string& name) {
      return std::ranges::find(exact_layer_names, name) != exact_layer_names.end();
    });
  }
  if (layer_name_regex_pattern) {
    return any_name(
        [&](const std::string& name) { return regex(*layer_name_regex_pattern, name); });
  }
  if (!layer_types && !layer_numbers) return false;
  return (!layer_types || type_matches(*layer_types, names)) &&
         (!layer_numbers || number_matches(*layer_numbers, layer));
}

}  // namespace te::inspect
