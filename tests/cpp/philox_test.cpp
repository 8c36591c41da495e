// Compares the generator with the known answers that its authors publish, and checks the dropout
// decision.
#include "core/philox.h"

#include <gtest/gtest.h>

#include "core/dropout.h"

namespace te {
namespace {

void expect_words(const PhiloxWords& words, uint32_t a, uint32_t b, uint32_t c, uint32_t d) {
  EXPECT_EQ(words.at[0], a);
  EXPECT_EQ(words.at[1], b);
  EXPECT_EQ(words.at[2], c);
  EXPECT_EQ(words.at[3], d);
}

TEST(Philox, KnownAnswers) {
  constexpr uint32_t kOnes = 0xffffffffu;
  PhiloxWords words[1] = {{{0, 0, 0, 0}}};
  philox4x32(words, 0, 0);
  expect_words(words[0], 0x5f6fb709u, 0x0d893f64u, 0x4f121f81u, 0x4f730a48u);
  words[0] = {{kOnes, kOnes, kOnes, kOnes}};
  philox4x32(words, kOnes, kOnes);
  expect_words(words[0], 0x5207ddc2u, 0x45165e59u, 0x4d8ee751u, 0x8c52f662u);
  words[0] = {{0x243f6a88u, 0x85a308d3u, 0x13198a2eu, 0x03707344u}};
  philox4x32(words, 0xa4093822u, 0x299f31d0u);
  expect_words(words[0], 0x4dfccabau, 0x190a87f0u, 0xc47362bau, 0xb6b5242au);
}

TEST(Philox, CountersDoNotInfluenceEachOther) {
  PhiloxWords words[3] = {philox_counter(7), philox_counter(8), philox_counter(1ull << 40)};
  draw(words, 42);
  const PhiloxWords alone = random_words(42, 1ull << 40);
  expect_words(words[2], alone.at[0], alone.at[1], alone.at[2], alone.at[3]);
}

TEST(Philox, SeedAndGroupUseAllTheirBits) {
  const PhiloxWords drawn = random_words(0x299f31d0a4093822u, 0x85a308d3243f6a88u);
  PhiloxWords words[1] = {{{0x243f6a88u, 0x85a308d3u, 0, 0}}};
  philox4x32(words, 0xa4093822u, 0x299f31d0u);
  expect_words(drawn, words[0].at[0], words[0].at[1], words[0].at[2], words[0].at[3]);
}

TEST(DropoutRule, RoundsPUpAndScalesAccordingly) {
  EXPECT_EQ(dropout_rule(0.0f).threshold, 0u);
  EXPECT_EQ(dropout_rule(0.0f).scale, 1.0f);
  EXPECT_EQ(dropout_rule(0.5f).threshold, 0x8000u);
  EXPECT_EQ(dropout_rule(0.5f).scale, 2.0f);
  EXPECT_EQ(dropout_rule(0.1f).threshold, 6554u);
  EXPECT_EQ(dropout_rule(0.1f).scale, 65536.0f / (65536.0f - 6554.0f));
  EXPECT_EQ(dropout_rule(0x1p-40f).threshold, 1u);             // smaller than a step
  EXPECT_EQ(dropout_rule(0x1.fffffep-1f).threshold, 0xffffu);  // never all elements
  EXPECT_EQ(dropout_rule(0x1.fffffep-1f).scale, 65536.0f);
}

TEST(Dropout, EachElementOfADrawHasBitsOfItsOwn) {
  const PhiloxWords words{{0x00020001u, 0x00040003u, 0x00060005u, 0x00080007u}};
  for (int element = 0; element < kElementsPerDraw; ++element)
    EXPECT_EQ(random_bits(words, element), static_cast<uint32_t>(element + 1));
}

TEST(Dropout, ADroppedElementIsZeroWhateverItWas) {
  const DropoutRule rule = dropout_rule(0.5f);
  EXPECT_EQ(dropout(INFINITY, 0x7fffu, rule), 0.0f);
  EXPECT_EQ(dropout(NAN, 0, rule), 0.0f);
  EXPECT_EQ(dropout(3.0f, 0x8000u, rule), 6.0f);
}

}  // namespace
}  // namespace te
