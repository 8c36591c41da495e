#include "inspect/config_yaml_text.h"

#include <algorithm>
#include <string_view>

#include "core/error.h"

namespace te::inspect {

size_t end_of_anchor(const SourceText& source, size_t begin) {
  const std::string_view text = source.text();
  const size_t end = std::min(text.find_first_of(" \t\r\n[]{},", begin), text.size());
  const auto is_letter = [](char c) {
    return ('a' <= c && c <= 'z') || ('A' <= c && c <= 'Z') || ('0' <= c && c <= '9') || c == '-' ||
           c == '_';
  };
  const std::string_view name = text.substr(begin + 1, end - begin - 1);
  const auto other = std::ranges::find_if_not(name, is_letter);
  if (other == name.end()) return end;
  throw TextError(source.mark(begin + 1 + static_cast<size_t>(other - name.begin())),
                  "expected letters, digits, - and _ in the name of an anchor, and a space after "
                  "it, got more");
}

void reject_tabs_and_directives(const SourceText& source,
                                const std::vector<std::pair<size_t, size_t>>& opaque) {
  const std::string_view text = source.text();
  auto span = opaque.begin();
  for (size_t i = 0; i < text.size(); ++i) {
    if (span != opaque.end() && i >= span->first) {
      i = std::max(i, span->second) - 1;
      ++span;
      continue;
    }
    const char before = i == 0 ? '\n' : text[i - 1];
    const bool begins_line = before == '\n' || before == '\r';
    if (text[i] == '#' && (begins_line || before == ' ' || before == '\t'))
      i = std::min(text.find_first_of("\r\n", i), text.size());
    if (i == text.size()) return;
    if (text[i] == '\t') throw TextError(source.mark(i), "expected spaces, got a tab");
    if (text[i] == '%' && begins_line && !text.substr(i).starts_with("%YAML ")) {
      throw TextError(source.mark(i), "expected a value, got a directive");
    }
  }
}

}  // namespace te::inspect
