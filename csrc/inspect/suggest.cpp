#include "inspect/suggest.h"

#include <algorithm>

namespace te::inspect {
namespace {

constexpr size_t kLongestWord = 64;  // longer words cannot be misspelt names
constexpr size_t kMostListed = 16;
constexpr size_t kShortestBeginning = 3;

// The first candidate that is a beginning of the word, or that begins with the word, such as `freq`
// for `frequency`.
std::optional<std::string> shortened(std::string_view word,
                                     const std::vector<std::string>& candidates) {
  for (const std::string& candidate : candidates) {
    const size_t shared = std::min(word.size(), candidate.size());
    const auto beginning = [&](std::string_view text) { return text.substr(0, shared); };
    if (shared >= kShortestBeginning && equal_without_case(beginning(word), beginning(candidate)))
      return candidate;
  }
  return std::nullopt;
}

char lower(char c) { return 'A' <= c && c <= 'Z' ? static_cast<char>(c - 'A' + 'a') : c; }

}  // namespace

bool equal_without_case(std::string_view a, std::string_view b) {
  return std::ranges::equal(a, b, {}, lower, lower);
}

int edit_distance(std::string_view a, std::string_view b) {
  std::vector<int> before(b.size() + 1), last(b.size() + 1), row(b.size() + 1);
  for (size_t j = 0; j <= b.size(); ++j) last[j] = static_cast<int>(j);
  for (size_t i = 1; i <= a.size(); ++i) {
    row[0] = static_cast<int>(i);
    for (size_t j = 1; j <= b.size(); ++j) {
      const bool same = lower(a[i - 1]) == lower(b[j - 1]);
      row[j] = std::min({last[j] + 1, row[j - 1] + 1, last[j - 1] + (same ? 0 : 1)});
      const bool swapped = i > 1 && j > 1 && lower(a[i - 1]) == lower(b[j - 2]) &&
                           lower(a[i - 2]) == lower(b[j - 1]);
      if (swapped) row[j] = std::min(row[j], before[j - 2] + 1);
    }
    before = last;
    last = row;
  }
  return last[b.size()];
}

std::optional<std::string> nearest(std::string_view word,
                                   const std::vector<std::string>& candidates) {
  if (word.size() > kLongestWord) return std::nullopt;
  std::optional<std::string> best;
  int best_distance = std::max(1, static_cast<int>(word.size() + 1) / 3) + 1;
  for (const std::string& candidate : candidates) {
    const int distance = edit_distance(word, candidate);
    if (distance < best_distance) {
      best_distance = distance;
      best = candidate;
    }
  }
  return best;
}

std::string expected_one_of(const std::vector<std::string>& candidates, std::string_view word,
                            const std::vector<std::string>& unlisted) {
  std::string text = candidates.empty() ? "expected nothing" : "expected ";
  if (candidates.size() > 1) text += "one of ";
  for (size_t i = 0; i < std::min(candidates.size(), kMostListed); ++i) {
    text.append(i > 0 ? ", " : "").append(candidates[i]);
  }
  if (candidates.size() > kMostListed) {
    text.append(" and ").append(std::to_string(candidates.size() - kMostListed)).append(" more");
  }
  text.append(", got '").append(word.substr(0, kLongestWord)).append("'");
  std::vector<std::string> all = candidates;
  all.insert(all.end(), unlisted.begin(), unlisted.end());
  auto suggestion = nearest(word, all);
  if (!suggestion) suggestion = shortened(word, all);
  if (suggestion) {
    text.append("; did you mean '").append(*suggestion).append("'?");
  }
  return text;
}

}  // namespace te::inspect
