// Errors that C++ throws and Python receives. The kind selects the type of the Python exception;
// the text has the form `[op] expected ..., got ...`. The core throws no other exceptions on
// purpose.
#pragma once

#include <sstream>
#include <stdexcept>
#include <string>
#include <string_view>
#include <utility>

namespace te {

enum class Kind { Value, Type, Unsupported, Runtime, Internal };

class Error : public std::runtime_error {
 public:
  Error(Kind kind, const std::string& message) : std::runtime_error(message), kind_(kind) {}
  Kind kind() const { return kind_; }

 private:
  Kind kind_;
};

// Joins its arguments with operator<<; every core type that appears in messages has one.
template <class... Parts>
std::string concat(const Parts&... parts) {
  std::ostringstream text;
  (text << ... << parts);
  return text.str();
}

template <class... Parts>
[[noreturn]] void fail(Kind kind, std::string_view op, const Parts&... parts) {
  throw Error(kind, concat("[", op, "] ", parts...));
}

// The parts are formatted only when the condition does not hold.
template <class... Parts>
void require(bool condition, Kind kind, std::string_view op, const Parts&... parts) {
  if (!condition) [[unlikely]]
    fail(kind, op, parts...);
}

}  // namespace te
