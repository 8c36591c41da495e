// What only C++ sees of reading YAML: marks, under the sanitizers. Python compares the values with
// PyYAML's.
#include <gtest/gtest.h>

#include <limits>

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

}  // namespace
}  // namespace te::inspect
