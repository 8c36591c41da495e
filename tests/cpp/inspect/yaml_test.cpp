// Reading YAML: the places of nodes, which only C++ has, under sanitizers. Tests in Python compare
// the values with those of PyYAML.
#include <gtest/gtest.h>

#include <limits>

#include "core/error.h"
#include "inspect/config_yaml.h"
#include "inspect/source_text.h"

namespace te::inspect {
namespace {

TEST(Yaml, MarksCountLinesAndCharacters) {
  const Node root = parse_yaml("# é\r\n\"é\": &x {é: [1, 'two']}\r\nb: *x\n");
  const Node* first = root.find("é");
  ASSERT_NE(first, nullptr);
  EXPECT_EQ(first->mark.line, 2);
  EXPECT_EQ(first->mark.column, 9);
  const Node& two = first->find("é")->as_sequence()[1];
  EXPECT_EQ(two.mark.column, 17);
  EXPECT_EQ(root.find("b")->mark.line, 2) << "an alias points to what it stands for";
  EXPECT_EQ(content_hash(*first), content_hash(*root.find("b")));
}

TEST(Yaml, HashSeesTypesAndOrderButNoMarks) {
  const auto hash = [](std::string_view text) { return content_hash(parse_yaml(text)); };
  EXPECT_EQ(hash("{a: 1, b: 2}"), hash("a: 1 # one\n\nb: 0x2"));
  EXPECT_NE(hash("{a: 1, b: 2}"), hash("{b: 2, a: 1}"));
  EXPECT_NE(hash("a: 1"), hash("a: '1'"));
  EXPECT_NE(hash("a: []"), hash("a: {}"));
  EXPECT_NE(hash("[[a], b]"), hash("[[a, b]]"));
}

TEST(Yaml, ErrorsSayWhere) {
  try {
    parse_yaml("a:\n  é: 1\n  é: 2\n");
    FAIL() << "a duplicate key was accepted";
  } catch (const TextError& error) {
    EXPECT_EQ(error.mark.line, 3);
    EXPECT_EQ(error.mark.column, 3);
    EXPECT_STREQ(error.what(), "expected each key once, got 'é' again");
  }
}

TEST(Yaml, ScalarsAreUtf8) {
  EXPECT_EQ(parse_yaml(R"("\N\_é\N")").as_string(), "\xc2\x85\xc2\xa0é\xc2\x85");
  EXPECT_EQ(to_utf8("é\x85\xff"), "é\xc2\x85\xc3\xbf");
  EXPECT_EQ(to_utf8("\xed\xa0\x80"), "\xc3\xad\xc2\xa0\xc2\x80") << "a lone surrogate";
  EXPECT_EQ(to_utf8("\xc3"), "\xc3\x83") << "half a character";
}

TEST(Yaml, AByteOrderMarkIsNoColumn) {
  EXPECT_EQ(parse_yaml("\xef\xbb\xbf{a: 1}").find("a")->mark.column, 5);
}

TEST(Yaml, ErrorsQuoteWholeCharacters) {
  try {
    parse_yaml("\"\\é\"");
    FAIL() << "an unknown escape was accepted";
  } catch (const TextError& error) {
    EXPECT_EQ(to_utf8(error.what()), error.what());
  }
}

TEST(Yaml, NumbersBeyondADoubleAreInfiniteOrZero) {
  for (const char* large : {"0171.0e+400", "0_0.5e+400", "1.0e+9223372036854775807"})
    EXPECT_EQ(parse_yaml(large).as_double(), std::numeric_limits<double>::infinity()) << large;
  for (const char* small : {"171000.0e-400", ".1e-400", "0.1e-9223372036854775807"})
    EXPECT_EQ(parse_yaml(small).as_double(), 0.0) << small;
}

TEST(Node, EditsKeysInPlace) {
  Node root = parse_yaml("{a: 1, b: 2, c: 3}");
  root.set("b", {.mark = {}, .value = std::string("two")});
  root.set("d", {.mark = {}, .value = true});
  root.erase("a");
  root.erase("missing");
  EXPECT_EQ(brief(root), "{'b': 'two', 'c': 3, 'd': true}");
  EXPECT_EQ(root.find("a"), nullptr);
  EXPECT_EQ(Node().find("a"), nullptr);
}

TEST(Node, BriefShortensAtWholeCharacters) {
  Node node{.mark = {}, .value = std::string(35, 'x') + "ééééé"};
  EXPECT_EQ(brief(node), "'" + std::string(35, 'x') + "...");
  node.value = Node::Sequence(5000);
  EXPECT_LE(brief(node).size(), 40U);
}

std::string refused(std::string_view text) {
  try {
    parse_yaml(text);
  } catch (const TextError& error) {
    return concat(error.mark.line, ":", error.mark.column, " ", error.what());
  }
  return "";
}

TEST(Yaml, MistakesOfIndentationAreToldAsSuch) {
  const std::string got = " expected YAML, got ";
  EXPECT_EQ(refused("a:\n    b:\n      c: 1\n     d: 2\n"),
            "4:6" + got + "a line indented by 5; the lines above are indented by 6, 4, 0");
  EXPECT_EQ(refused("a:\n- b: 1\n c: 2\n"),
            "3:2" + got + "a line indented by 1; the lines above are indented by 2, 0");
  EXPECT_EQ(refused("a:\n  b: 1\n   c: 2\n"),
            "3:5" + got +
                "a line indented by 3, deeper than line 2 above, which has its value "
                "already and is indented by 2");
  EXPECT_EQ(refused("a:\n  b: 1\n\n  # more\n   c: 2\n"),
            "5:4" + got + "a line indented by 3; the lines above are indented by 2, 0");
  EXPECT_EQ(refused("a:\n  b\n    c: 2\n"), "3:6" + got + "no colon behind the key in line 2");
  EXPECT_EQ(refused("b\nc: 2\n"), "2:2" + got + "no colon behind the key in line 1");
}

TEST(Yaml, OtherMistakesAreToldInWords) {
  constexpr auto kAlias =
      "an alias without an anchor above; a text that begins with * goes in quotes";
  const std::string got = " expected YAML, got ";
  EXPECT_EQ(refused("a: b: c\n"),
            "1:5" + got + "a second colon; a text with ': ' in it goes in quotes");
  EXPECT_EQ(refused("a:\n  - 1\n  b: 2\n"),
            "3:3" + got +
                "an item of a list, '- ', beside a key, 'key:'; they go at different "
                "indentations");
  EXPECT_EQ(refused("a: - 1\n"),
            "1:4" + got + "an item of a list, '- ', in the line of its key; it goes below");
  EXPECT_EQ(refused("a: 'x' y\n"), "1:8" + got + "more text behind a value");
  EXPECT_EQ(refused("a: {b: [1, 2], c: 3\nd: 4\n"),
            "2:2" + got + "no } that closes the { of line 1, column 4");
  EXPECT_EQ(refused("a: @b\n"), "1:4" + got + "a text that begins with @; it goes in quotes");
  EXPECT_EQ(refused("a: *x\n"), "1:4" + got + kAlias);
  EXPECT_EQ(refused("a: *\n"), "1:5" + got + kAlias);
}

TEST(Yaml, TabsBehindTheSignOfABlockAreRefused) {
  EXPECT_EQ(refused("a: |\t\n  b\n"), "1:5 expected spaces, got a tab");
  EXPECT_EQ(refused("a: >- \t\n  b\n"), "1:7 expected spaces, got a tab");
  EXPECT_EQ(parse_yaml("a: | # \t\n  b\tc\n").find("a")->as_string(), "b\tc\n");
}

TEST(Yaml, TextsBetweenBracketsBeginWithNoColon) {
  const std::string expected = " expected quotes around a text that begins with a colon, got none";
  EXPECT_EQ(refused("[1,:@ 2]\n"), "1:4" + expected);
  EXPECT_EQ(refused("{? :a}\n"), "1:4" + expected);
  EXPECT_EQ(parse_yaml("a: :b\n").find("a")->as_string(), ":b");
  EXPECT_EQ(parse_yaml("[':b']\n").as_sequence()[0].as_string(), ":b");
}

TEST(Yaml, WhatStandsBehindAnAnchorIsNoPartOfItsName) {
  const std::string expected =
      " expected letters, digits, - and _ in the name of an anchor, and a space after it, got more";
  EXPECT_EQ(refused("[{&xgemm: fprop}]\n"), "1:9" + expected);
  EXPECT_EQ(refused("a: &\xc3\xa9 b\n"), "1:5" + expected);
  parse_yaml("a: [&x , &y-_1 [], &z]\n");
}

}  // namespace
}  // namespace te::inspect
