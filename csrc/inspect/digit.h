#pragma once

namespace te::inspect {

constexpr bool is_digit(char c) { return '0' <= c && c <= '9'; }

}  // namespace te::inspect
