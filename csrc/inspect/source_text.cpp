#include "inspect/source_text.h"

#include <algorithm>
#include <cstdint>

#include "core/error.h"

namespace te::inspect {
namespace {

// The length and code point of a UTF-8 sequence; length 0: it is invalid.
struct Character {
  size_t length;
  uint32_t code;
};

Character decode(std::string_view text) {
  constexpr uint32_t kSmallest[] = {0, 0, 0x80, 0x800, 0x10000};
  const auto byte = [&](size_t i) { return static_cast<unsigned char>(text[i]); };
  const size_t length = byte(0) < 0x80         ? 1
                        : byte(0) >> 5 == 0x06 ? 2
                        : byte(0) >> 4 == 0x0e ? 3
                        : byte(0) >> 3 == 0x1e ? 4
                                               : 0;
  if (length == 0 || length > text.size()) return {0, 0};
  uint32_t code = length == 1 ? byte(0) : byte(0) & (0x7f >> length);
  for (size_t i = 1; i < length; ++i) {
    if (byte(i) >> 6 != 2) return {0, 0};
    code = code << 6 | (byte(i) & 0x3f);
  }
  const bool valid =
      code >= kSmallest[length] && code <= 0x10ffff && !(0xd800 <= code && code <= 0xdfff);
  return valid ? Character{length, code} : Character{0, 0};
}

bool is_printable(uint32_t code) {
  if (code < 0x20) return code == '\t' || code == '\n' || code == '\r';
  if (code < 0xa0) return code < 0x7f;
  return code != 0xfffe && code != 0xffff;
}

// The name of a character that ends a line in YAML 1.1 (and so for PyYAML), but is text for
// yaml-cpp; null for other characters.
const char* unicode_line_end(uint32_t code) {
  switch (code) {
    case 0x85: return "U+0085 (in quotes: \\N)";
    case 0x2028: return "U+2028 (in quotes: \\L)";
    case 0x2029: return "U+2029 (in quotes: \\P)";
    default: return nullptr;
  }
}

}  // namespace

std::string to_utf8(std::string text) {
  size_t i = 0;
  while (i < text.size()) {
    const size_t length = decode(std::string_view(text).substr(i)).length;
    if (length == 0) {
      const auto byte = static_cast<unsigned char>(text[i]);
      const char pair[] = {static_cast<char>(0xc0 | byte >> 6),
                           static_cast<char>(0x80 | (byte & 0x3f))};
      text.replace(i, 1, pair, 2);
    }
    i += length == 0 ? 2 : length;
  }
  return text;
}

SourceText::SourceText(std::string_view text) : text_(text), lines_{0} {
  if (text.size() > kMaxBytes) {
    throw TextError({}, concat("expected at most ", kMaxBytes, " bytes, got ", text.size()));
  }
  for (size_t i = 0; i < text.size(); ++i) {
    const bool ends_line =
        text[i] == '\n' || (text[i] == '\r' && !text.substr(i + 1).starts_with('\n'));
    if (ends_line) lines_.push_back(i + 1);
  }
  check_characters();
}

Mark SourceText::mark(size_t offset) const {
  offset = std::min(offset, text_.size());
  const auto line = std::prev(std::ranges::upper_bound(lines_, offset));
  const std::string_view before = text_.substr(*line, offset - *line);
  const auto characters = std::ranges::count_if(
      before, [](char c) { return (static_cast<unsigned char>(c) & 0xc0) != 0x80; });
  return {static_cast<int>(line - lines_.begin()) + 1, static_cast<int>(characters) + 1};
}

void SourceText::check_characters() const {
  for (size_t i = 0; i < text_.size();) {
    const Character character = decode(text_.substr(i));
    if (character.length == 0)
      throw TextError(mark(i), "expected UTF-8, got an invalid byte sequence");
    if (character.code == 0xfeff)
      throw TextError(mark(i), "expected text without a byte order mark, got U+FEFF");
    if (const char* name = unicode_line_end(character.code))
      throw TextError(mark(i), concat("expected a line feed at a line's end, got ", name));
    if (!is_printable(character.code))
      throw TextError(mark(i), concat("expected text, got control character ", character.code));
    if (character.code == '\r' && !text_.substr(i + 1).starts_with('\n'))
      throw TextError(mark(i), "expected a line feed at a line's end, got a carriage return alone");
    i += character.length;
  }
}

}  // namespace te::inspect
