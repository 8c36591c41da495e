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

// The names that selectors compare with: every combination of the components of the layer's name
// and of their documented aliases, for up to eight components that have an alias. The aliases are
//   self_attention  -> self_attn               qkv        -> linear_qkv
//   layernorm_qkv   -> layernorm_linear_qkv    query      -> linear_q
//   layernorm_query -> layernorm_linear_q      key_value  -> linear_kv
// With a `pattern`, only those aliases count that are spelled in it.
std::vector<std::string> names_of_layer(std::string_view layer,
                                        std::optional<std::string_view> pattern = {});

struct Selector {
  static constexpr int kEveryNumber = std::numeric_limits<int>::max();

  std::vector<std::string> exact_layer_names = {};
  std::optional<std::string> layer_name_regex_pattern = {};
  std::optional<std::vector<std::string>> layer_types =
      {};  // parts of names; "all", or an empty list, selects every layer
  std::optional<std::vector<std::pair<int, int>>> layer_numbers =
      {};  // closed ranges; "all" is {0, kEveryNumber}

  // If the selector has exact names, only these count; else, if it has a regular expression, only
  // that; else types and numbers, which must both match if both are given. A selector without any
  // of them matches nothing.
  //
  // A regular expression with a negative lookaround, which excludes layers, is compared only with
  // those aliases that it spells. Otherwise it would match excluded layers by their aliases.
  //
  // The number of a layer is the only run of digits in its name that does not follow "fc" or
  // "gemm_". A layer with no or several such runs has no number.
  bool matches(std::string_view layer, const RegexSearch& regex) const;
};

}  // namespace te::inspect
