#include "inspect/yaml_scalar.h"

#include <algorithm>
#include <charconv>
#include <cmath>
#include <iterator>
#include <limits>
#include <optional>
#include <string>
#include <system_error>

#include "core/error.h"
#include "inspect/digit.h"

namespace te::inspect {
namespace {

using Value = decltype(Node::value);

constexpr std::string_view kNull[] = {"", "~", "null", "Null", "NULL"};
constexpr std::string_view kTrue[] = {"yes",  "Yes", "YES", "true", "True",
                                      "TRUE", "on",  "On",  "ON"};
constexpr std::string_view kFalse[] = {"no",    "No",  "NO",  "false", "False",
                                       "FALSE", "off", "Off", "OFF"};
constexpr std::string_view kInfinity[] = {".inf", ".Inf", ".INF"};
constexpr std::string_view kNaN[] = {".nan", ".NaN", ".NAN"};

template <class Words>
bool one_of(const Words& words, std::string_view text) {
  return std::ranges::find(words, text) != std::end(words);
}

bool digits_or_underscores(std::string_view text) {
  return std::ranges::all_of(text, [](char c) { return is_digit(c) || c == '_'; });
}

// [0-9][0-9_]*
bool is_number(std::string_view text) {
  return !text.empty() && is_digit(text[0]) && digits_or_underscores(text);
}

std::string without_underscores(std::string_view text) {
  std::string digits;
  std::ranges::copy_if(text, std::back_inserter(digits), [](char c) { return c != '_'; });
  return digits;
}

// Removes a sign from the front of the text. Returns whether it was a minus.
bool take_minus(std::string_view& text) {
  const bool minus = text.starts_with('-');
  if (minus || text.starts_with('+')) text.remove_prefix(1);
  return minus;
}

[[noreturn]] void too_large() {
  fail(Kind::Value, "yaml", "expected an integer of at most 64 bits");
}

int64_t with_sign(uint64_t magnitude, bool minus) {
  const uint64_t largest =
      static_cast<uint64_t>(std::numeric_limits<int64_t>::max()) + (minus ? 1 : 0);
  if (magnitude > largest) too_large();
  return static_cast<int64_t>(minus ? 0 - magnitude : magnitude);
}

uint64_t parse_digits(std::string_view digits, int base) {
  uint64_t value = 0;
  const auto parsed = std::from_chars(digits.data(), digits.data() + digits.size(), value, base);
  if (parsed.ec != std::errc()) too_large();
  return value;
}

std::optional<int64_t> resolve_radix(std::string_view text, bool minus, int base,
                                     std::string_view alphabet) {
  if (text.empty() || text.find_first_not_of(alphabet) != text.npos) return std::nullopt;
  const std::string digits = without_underscores(text);
  if (digits.empty())
    return base == 8 ? std::optional<int64_t>(0) : std::nullopt;  // `0_` is 0, `0x_` is no number
  return with_sign(parse_digits(digits, base), minus);
}

// Whether a text has the form of the groups after the first of a sexagesimal number:
// (:[0-5]?[0-9])+
bool are_minutes(std::string_view text) {
  while (!text.empty()) {
    text.remove_prefix(1);  // the colon
    const std::string_view group = text.substr(0, std::min(text.find(':'), text.size()));
    const bool one = group.size() == 1 && is_digit(group[0]);
    const bool two = group.size() == 2 && '0' <= group[0] && group[0] <= '5' && is_digit(group[1]);
    if (!one && !two) return false;
    text.remove_prefix(group.size());
  }
  return true;
}

std::optional<int64_t> resolve_sexagesimal(std::string_view text, bool minus) {
  const size_t colon = text.find(':');
  if (colon == text.npos || !is_number(text.substr(0, colon)) || text[0] == '0' ||
      !are_minutes(text.substr(colon))) {
    return std::nullopt;
  }
  std::string digits = without_underscores(text);
  uint64_t value = 0;
  for (std::string_view rest = digits; !rest.empty();) {
    const std::string_view group = rest.substr(0, std::min(rest.find(':'), rest.size()));
    if (value > std::numeric_limits<uint64_t>::max() / 60 - 60) too_large();
    value = value * 60 + parse_digits(group, 10);
    rest.remove_prefix(std::min(group.size() + 1, rest.size()));
  }
  return with_sign(value, minus);
}

std::optional<int64_t> resolve_int(std::string_view text) {
  const bool minus = take_minus(text);
  if (text == "0") return 0;
  if (text.starts_with("0b")) return resolve_radix(text.substr(2), minus, 2, "01_");
  if (text.starts_with("0x"))
    return resolve_radix(text.substr(2), minus, 16, "0123456789abcdefABCDEF_");
  if (text.starts_with('0')) return resolve_radix(text.substr(1), minus, 8, "01234567_");
  if (is_number(text)) return resolve_radix(text, minus, 10, "0123456789_");
  return resolve_sexagesimal(text, minus);
}

// Whether a positive number like 0171.0e+400, which is out of the range of double, is too large
// rather than too small: whether it is at least 1.
bool reaches_one(std::string_view text) {
  const size_t e = std::min(text.find_first_of("eE"), text.size());
  const std::string_view mantissa = text.substr(0, e);
  const auto point = static_cast<int64_t>(std::min(mantissa.find('.'), mantissa.size()));
  const auto first = static_cast<int64_t>(mantissa.find_first_of("123456789"));
  const int64_t digits_before_point = first < point ? point - first : point - first + 1;
  if (e == text.size()) return digits_before_point > 0;
  std::string_view exponent = text.substr(e + 1);
  const bool minus = take_minus(exponent);
  int64_t value = 0;
  const auto parsed = std::from_chars(exponent.data(), exponent.data() + exponent.size(), value);
  constexpr int64_t kLarge = int64_t{1} << 40;  // no text has so many digits
  if (parsed.ec != std::errc() || value > kLarge) return !minus;
  return digits_before_point + (minus ? -value : value) > 0;
}

double parse_double(const std::string& text) {
  double value = 0;
  const auto parsed = std::from_chars(text.data(), text.data() + text.size(), value);
  if (parsed.ec != std::errc::result_out_of_range) return value;
  return reaches_one(text) ? std::numeric_limits<double>::infinity() : 0.0;
}

// Nothing, or [eE][-+][0-9]+
bool is_exponent(std::string_view text) {
  return text.empty() ||
         (text.size() >= 3 && (text[0] == 'e' || text[0] == 'E') &&
          (text[1] == '-' || text[1] == '+') && std::ranges::all_of(text.substr(2), is_digit));
}

// Parses a decimal number with a dot. The caller has removed a sign in front (`has_sign`), where
// std::from_chars takes no plus; it does take the plus of an exponent.
std::optional<double> resolve_decimal(std::string_view text, bool has_sign) {
  const size_t dot = text.find('.');
  if (dot == text.npos) return std::nullopt;
  const std::string_view whole = text.substr(0, dot), rest = text.substr(dot + 1);
  const size_t fraction = std::min(rest.find_first_of("eE"), rest.size());
  const bool is_fraction =
      digits_or_underscores(rest.substr(0, fraction)) && is_exponent(rest.substr(fraction));
  const bool starts_with_dot = whole.empty() && !has_sign && fraction > 0 && is_digit(rest[0]);
  if (!is_fraction || !(is_number(whole) || starts_with_dot)) return std::nullopt;
  return parse_double(without_underscores(text));
}

std::optional<double> resolve_sexagesimal_decimal(std::string_view text) {
  const size_t colon = text.find(':'), dot = text.find('.');
  if (colon == text.npos || dot == text.npos || dot < colon) return std::nullopt;
  if (!is_number(text.substr(0, colon)) || !are_minutes(text.substr(colon, dot - colon)) ||
      !digits_or_underscores(text.substr(dot + 1))) {
    return std::nullopt;
  }
  const std::string digits = without_underscores(text);
  double value = 0, base = 1;  // summed from the last group on, as PyYAML does
  for (size_t end = digits.size();;) {
    const size_t separator = digits.rfind(':', end - 1);
    const size_t begin = separator == digits.npos ? 0 : separator + 1;
    value += parse_double(digits.substr(begin, end - begin)) * base;
    base *= 60;
    if (begin == 0) return value;
    end = separator;
  }
}

std::optional<double> resolve_float(std::string_view text) {
  if (one_of(kNaN, text)) return std::numeric_limits<double>::quiet_NaN();
  const bool has_sign = text.starts_with('-') || text.starts_with('+');
  const double sign = take_minus(text) ? -1.0 : 1.0;
  if (one_of(kInfinity, text)) return sign * std::numeric_limits<double>::infinity();
  std::optional<double> value = resolve_decimal(text, has_sign);
  if (!value) value = resolve_sexagesimal_decimal(text);
  if (!value) return std::nullopt;
  return sign * *value;
}

}  // namespace

Value resolve_plain(std::string_view text) {
  if (one_of(kNull, text)) return {};
  if (one_of(kTrue, text)) return true;
  if (one_of(kFalse, text)) return false;
  if (const auto value = resolve_int(text)) return *value;
  if (const auto value = resolve_float(text)) return *value;
  return std::string(text);
}

}  // namespace te::inspect
