// Suggestions for misspelt words: "did you mean ...?"
#pragma once

#include <optional>
#include <string>
#include <string_view>
#include <vector>

namespace te::inspect {

// Whether two texts are equal if the case of ASCII letters is ignored.
bool equal_without_case(std::string_view a, std::string_view b);

// The number of insertions, deletions, replacements and swaps of neighbours that turn one word into
// the other, ignoring case.
int edit_distance(std::string_view a, std::string_view b);

// The candidate with the smallest edit distance to a word, if that is at most about a third of the
// word's length.
std::optional<std::string> nearest(std::string_view word,
                                   const std::vector<std::string>& candidates);

// Returns "expected one of a, b, c, got 'd'; did you mean 'a'?" Of many candidates, only the first
// are listed. `unlisted` candidates may be suggested, but are not listed.
std::string expected_one_of(const std::vector<std::string>& candidates, std::string_view word,
                            const std::vector<std::string>& unlisted = {});

}  // namespace te::inspect
