// "did you mean ...?"
#pragma once

#include <optional>
#include <string>
#include <string_view>
#include <vector>

namespace te::inspect {

// Equal but for the case of ASCII letters.
bool equal_without_case(std::string_view a, std::string_view b);

// The number of insertions, deletions, replacements and swaps of neighbours that turn one word into
// the other, ignoring case.
int edit_distance(std::string_view a, std::string_view b);

// The candidate nearest to a word, if at most a third of the word's letters differ.
std::optional<std::string> nearest(std::string_view word,
                                   const std::vector<std::string>& candidates);

// "expected one of a, b, c, got 'd'; did you mean 'a'?" Lists the first of many candidates. Those
// of `unlisted` are only suggested.
std::string expected_one_of(const std::vector<std::string>& candidates, std::string_view word,
                            const std::vector<std::string>& unlisted = {});

}  // namespace te::inspect
