// The text of a configuration file: checks its characters, and finds the line of an offset.
#pragma once

#include <stdexcept>
#include <string>
#include <string_view>
#include <vector>

#include "inspect/node.h"

namespace te::inspect {

// An error in a text, and its place.
class TextError : public std::runtime_error {
 public:
  TextError(Mark mark, const std::string& message) : std::runtime_error(message), mark(mark) {}
  Mark mark;
};

// Replaces every byte that is not part of a UTF-8 sequence by the character with that code.
// yaml-cpp returns such bytes for the escapes \N and \_ (U+0085 and U+00A0), and in messages that
// quote half of a character.
std::string to_utf8(std::string text);

class SourceText {
 public:
  static constexpr size_t kMaxBytes = size_t{1} << 20;

  // The text must outlive this object. Throws TextError for more than kMaxBytes, a byte order mark,
  // invalid UTF-8, control characters, and line ends that YAML 1.1 and yaml-cpp read differently.
  explicit SourceText(std::string_view text);

  std::string_view text() const { return text_; }
  Mark mark(size_t offset) const;

 private:
  void check_characters() const;

  std::string_view text_;
  std::vector<size_t> lines_;  // offsets at which lines begin
};

}  // namespace te::inspect
