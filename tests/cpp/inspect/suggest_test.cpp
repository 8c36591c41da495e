#include "inspect/suggest.h"

#include <gtest/gtest.h>

namespace te::inspect {
namespace {

TEST(Suggest, ListsWhatIsExpected) {
  EXPECT_EQ(expected_one_of({}, "x"), "expected nothing, got 'x'");
  EXPECT_EQ(expected_one_of({"min"}, "x"), "expected min, got 'x'");
  EXPECT_EQ(expected_one_of({"min", "max"}, "mix"),
            "expected one of min, max, got 'mix'; did you mean 'min'?");
}

TEST(Suggest, ListsTheFirstOfManyAndSuggestsAnyOfThem) {
  std::vector<std::string> many;
  for (char c = 'a'; c <= 'z'; ++c) many.push_back(std::string(8, c));
  EXPECT_TRUE(expected_one_of(many, "zzzzzzzy")
                  .ends_with("pppppppp and 10 more, got 'zzzzzzzy'; did you mean 'zzzzzzzz'?"));
}

TEST(Suggest, KnowsShorterAndLongerForms) {
  const std::vector<std::string> names = {"max", "freq", "start_step"};
  const auto ends = [&](std::string_view word, std::string_view end) {
    return expected_one_of(names, word).ends_with(end);
  };
  EXPECT_TRUE(ends("frequency", "got 'frequency'; did you mean 'freq'?"));
  EXPECT_TRUE(ends("Maximum", "did you mean 'max'?"));
  EXPECT_TRUE(ends("start", "did you mean 'start_step'?"));
  EXPECT_TRUE(ends("st", "got 'st'"));  // too short for a suggestion
  EXPECT_TRUE(ends("average", "got 'average'"));
}

}  // namespace
}  // namespace te::inspect
