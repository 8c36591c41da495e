// Selects the layers of a section.
#pragma once

#include <functional>
#include <limits>
#include <optional>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

namespace te::inspect {

// Python's re.search; the bindings implement it, tests use a small fake. Throws
// std::invalid_argument for a bad pattern.
using RegexSearch = std::function<bool(const std::string& pattern, const std::string& text)>;

// The names by which selectors know a layer: its own first, then those with the documented aliases:
// self_attention -> self_attn; layernorm_qkv -> layernorm_linear_qkv; qkv ->
// linear_qkv; layernorm_query -> layernorm_linear_q; query -> linear_q; key_value -> linear_kv
// (whole path components, every combination of the first eight that have one). With a `pattern`,
// those aliases alone that it spells.
std::vector<std::string> names_of_layer(std::string_view layer,
                                        std::optional<std::string_view> pattern = {});

struct Selector {
  static constexpr int kEveryNumber = std::numeric_limits<int>::max();

  std::vector<std::string> exact_layer_names = {};
  std::optional<std::string> layer_name_regex_pattern = {};
  std::optional<std::vector<std::string>> layer_types =
      {};  // parts of names; "all", or none: everything
  std::optional<std::vector<std::pair<int, int>>> layer_numbers =
      {};  // closed ranges; all: {0, kEveryNumber}

  // If the selector has exact names, they alone decide; else the regular expression; else types and
  // numbers, which must both match if both are given. A selector without any of them matches
  // nothing. A regular expression that excludes something knows the aliases that it spells alone:
  // it would find the layers that it excludes by their aliases. The number of a layer is the only
  // run of digits in its name that does not follow "fc" or "gemm_"; a layer without one, or with
  // several, has no number.
  bool matches(std::string_view layer, const RegexSearch& regex) const;
};

}  // namespace te::inspect
