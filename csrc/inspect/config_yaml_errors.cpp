#include "inspect/config_yaml_errors.h"

#include <yaml-cpp/exceptions.h>

#include <algorithm>
#include <optional>
#include <vector>

#include "core/error.h"

namespace te::inspect {
namespace {

struct Line {
  size_t begin;           // its offset
  size_t indent;          // spaces
  std::string_view text;  // what follows them
};

Line line_at(std::string_view text, size_t offset) {
  const size_t begin = offset == 0 ? 0 : text.find_last_of('\n', offset - 1) + 1;  // npos + 1 is 0
  const std::string_view line = text.substr(begin, text.find('\n', begin) - begin);
  const size_t indent = std::min(line.find_first_not_of(' '), line.size());
  return {begin, indent, line.substr(indent)};
}

// The nearest line above that has text other than a comment.
std::optional<Line> above(std::string_view text, size_t begin) {
  while (begin > 0) {
    const Line line = line_at(text, begin - 1);
    const bool blank = line.text.find_first_not_of(" \t\r") == line.text.npos;
    if (!blank && line.text.front() != '#') return line;
    begin = line.begin;
  }
  return std::nullopt;
}

bool has_colon(std::string_view line) {
  line = line.substr(0, line.find(" #"));
  const size_t end = line.find_last_not_of(" \t\r");
  return line.find(": ") != line.npos || (end != line.npos && line[end] == ':');
}

// The indentations that a line at this place may have to continue an open collection, deepest
// first.
std::vector<size_t> open_indents(std::string_view text, size_t begin) {
  std::vector<size_t> indents;
  for (auto line = above(text, begin); line; line = above(text, line->begin)) {
    std::vector<size_t> here = {line->indent};
    if (line->text.starts_with("- ")) here.insert(here.begin(), line->indent + 2);
    for (const size_t indent : here) {
      if (indents.empty() || indent < indents.back()) indents.push_back(indent);
    }
  }
  return indents;
}

std::string explain_end(const SourceText& source, size_t offset) {
  const Line line = line_at(source.text(), offset);
  if (offset != line.begin + line.indent) return "more text behind a value";
  const std::vector<size_t> indents = open_indents(source.text(), line.begin);
  if (std::ranges::find(indents, line.indent) != indents.end())
    return "an item of a list, '- ', beside a key, 'key:'; they go at different indentations";
  std::string known;
  for (const size_t indent : indents) known += concat(known.empty() ? "" : ", ", indent);
  return concat("a line indented by ", line.indent, "; the lines above are indented by ", known);
}

std::string explain_value(const SourceText& source, size_t offset) {
  const Line line = line_at(source.text(), offset);
  if (has_colon(line.text.substr(0, offset - line.begin - line.indent)))
    return "a second colon; a text with ': ' in it goes in quotes";
  const std::optional<Line> before = above(source.text(), line.begin);
  if (!before) return "a colon that follows no key";
  const int number = source.mark(before->begin).line;
  if (!has_colon(before->text)) return concat("no colon behind the key in line ", number);
  return concat("a line indented by ", line.indent, ", deeper than line ", number,
                " above, which has its value already and is indented by ", before->indent);
}

// Names the innermost bracket that is open at an offset. It also counts brackets in quotes and
// comments.
std::string explain_open_list(const SourceText& source, size_t offset) {
  std::vector<size_t> open;
  for (size_t i = 0; i < offset; ++i) {
    const char c = source.text()[i];
    if (c == '[' || c == '{') open.push_back(i);
    if ((c == ']' || c == '}') && !open.empty()) open.pop_back();
  }
  if (open.empty()) return "a bracket that closes no other";
  const char bracket = source.text()[open.back()];
  const Mark at = source.mark(open.back());
  return concat("no ", bracket == '[' ? "]" : "}", " that closes the ", bracket, " of line ",
                at.line, ", column ", at.column);
}

}  // namespace

std::string explain_yaml_error(const SourceText& source, size_t offset, std::string_view message) {
  using namespace YAML::ErrorMsg;  // NOLINT(google-build-using-namespace): names of its messages
  if (message == END_OF_MAP || message == END_OF_SEQ) return explain_end(source, offset);
  if (message == MAP_VALUE) return explain_value(source, offset);
  if (message == END_OF_MAP_FLOW || message == END_OF_SEQ_FLOW || message == FLOW_END)
    return explain_open_list(source, offset);
  if (message == BLOCK_ENTRY)
    return "an item of a list, '- ', in the line of its key; it goes below";
  if (message == UNKNOWN_ANCHOR || message == ALIAS_NOT_FOUND)
    return "an alias without an anchor above; a text that begins with * goes in quotes";
  if (message == UNKNOWN_TOKEN && offset < source.text().size())
    return concat("a text that begins with ", source.text()[offset], "; it goes in quotes");
  return std::string(message);
}

}  // namespace te::inspect
