// Sections, selectors and features of a configuration, and the messages about mistakes.
#include "inspect/config.h"

#include <gtest/gtest.h>

#include "core/error.h"
#include "inspect/rules.h"
#include "inspect/suggest.h"

namespace te::inspect {
namespace {

TEST(Config, EmptyOnesHaveNoFeatures) {
  for (const char* text : {"", "# nothing\n", "~", "{}"}) {
    const Loaded loaded = load(text);
    EXPECT_FALSE(loaded.has_errors()) << text;
    EXPECT_EQ(loaded.problems.empty(), text == std::string("{}")) << text;
    EXPECT_TRUE(loaded.config.sections.empty());
  }
  EXPECT_EQ(problems("# nothing\n"), "(warning) c.yaml: expected sections, got an empty file\n");
  EXPECT_EQ(problems("[a]"), "c.yaml:1:1: expected sections, each under its name, got ['a']\n");
  EXPECT_EQ(problems("a: [1"),
            "c.yaml:1:6: expected YAML, got no ] that closes the [ of line 1, column 4\n");
}

TEST(Config, SectionsInFileOrder) {
  const Loaded loaded = load(
      "first: {enabled: no}\n"
      "second:\n  transformer_engine: {DisableFp8Layer: {enabled: on}}\n"
      "  layers: {layer_types: fc1}\n  enabled: yes\n");
  EXPECT_FALSE(loaded.has_errors());
  EXPECT_EQ(loaded.config.names(), std::vector<std::string>({"first", "second"}));
  EXPECT_FALSE(loaded.config.sections[0].enabled);
  ASSERT_EQ(loaded.config.sections[1].uses.size(), 1U);
  const FeatureUse& use = loaded.config.sections[1].uses[0];
  EXPECT_EQ(use.feature, "DisableFP8Layer");
  EXPECT_EQ(use.written, "DisableFp8Layer");
  EXPECT_EQ(use.section, 1);
  EXPECT_EQ(use.mark.line, 3);
  EXPECT_EQ(brief(use.body), "{}");
  EXPECT_EQ(loaded.config.hash, load("first: {enabled: false}\nsecond: {transformer_engine: "
                                     "{DisableFp8Layer: {enabled: true}}, layers: {layer_types: "
                                     "fc1}, enabled: true}")
                                    .config.hash);
}

TEST(Config, SectionMistakes) {
  EXPECT_EQ(problems("a: {layers: {layer_types: [x]}}"),
            "c.yaml:1:1: a: expected the key enabled, got none\n"
            "(warning) c.yaml:1:1: a: expected at least one feature, got none\n");
  EXPECT_EQ(problems("a: {enabled: 'no', layers: {layer_types: [x]}, DisableFP8GEM: {}}"),
            "c.yaml:1:14: a.enabled: expected True or False, got 'no'\n"
            "c.yaml:1:48: a.DisableFP8GEM: unknown namespace or feature: expected one of enabled, "
            "layers, transformer_engine, got 'DisableFP8GEM'\n");
  EXPECT_EQ(
      problems(
          "a: {enabled: yes, layer: {}, transfomer_engine: {DisableFP8Layer: {enabled: yes}}}"),
      "c.yaml:1:1: a: expected the key layers, got none\n"
      "c.yaml:1:19: a.layer: unknown namespace or feature: expected one of enabled, layers, "
      "transformer_engine, got 'layer'; did you mean 'layers'?\n"
      "c.yaml:1:30: a.transfomer_engine: unknown namespace or feature: expected one of enabled, "
      "layers, transformer_engine, got 'transfomer_engine'; did you mean "
      "'transformer_engine'?\n");
  EXPECT_EQ(
      problems("a: {enabled: yes, layers: {layer_types: x}, FakeQuant: {}}"),
      "c.yaml:1:45: a.FakeQuant: expected a namespace around the feature FakeQuant, got none; "
      "did you mean 'transformer_engine: {FakeQuant: ...}'?\n");
  EXPECT_EQ(problems("a: 3"), "c.yaml:1:4: a: expected a mapping, got 3\n");
}

TEST(Config, DisabledPartsOnlyWarn) {
  EXPECT_EQ(problems("a: {enabled: no, layers: {layer_type: x}, transformer_engine: {X: 1}}"),
            "(warning) c.yaml:1:27: a.layers.layer_type: expected one of exact_layer_names, "
            "layer_name_regex_pattern, layer_types, layer_numbers, got 'layer_type'; did you mean "
            "'layer_types'?\n"
            "(warning) c.yaml:1:64: a.transformer_engine.X: unknown feature: expected one of "
            "LogTensorStats, LogFp8TensorStats, DisableFP8GEMM, DisableFP8Layer, PerTensorScaling, "
            "FakeQuant, Custom, got 'X'\n");
  const Loaded loaded = load(
      "a: {enabled: yes, layers: {layer_types: x}, transformer_engine: {FakeQuant: {enabled: no}, "
      "Custom: {enabled: yes, any: [1]}}, LogTensorStats: {enabled: yes, stats: max, tensors: x}}");
  EXPECT_FALSE(loaded.has_errors());
  EXPECT_FALSE(loaded.problems.empty());
  ASSERT_EQ(loaded.config.sections[0].uses.size(), 2U);
  EXPECT_EQ(loaded.config.sections[0].uses[0].feature, "Custom");
  EXPECT_EQ(loaded.config.sections[0].uses[1].ns, "base")
      << "a bare feature is of the base namespace";
}

TEST(Config, AFeatureOfTwoNamespacesWarnsWhereItIsBare) {
  const auto found = [](std::string_view feature) {
    return problems(concat("a: {enabled: yes, layers: {layer_types: x}, ", feature, "}"));
  };
  EXPECT_EQ(found("base: {LogTensorStats: {enabled: yes, stats: max, tensors: x}}"), "");
  EXPECT_EQ(found("LogTensorStats: {enabled: yes, stats: max, tensors: x}"),
            "(warning) c.yaml:1:45: a.LogTensorStats: expected a namespace around a feature that "
            "two namespaces have, got none: acts only where the program calls it; write "
            "'transformer_engine: {LogTensorStats: ...}' for GEMMs, or 'base: {LogTensorStats: "
            "...}'\n");
}

TEST(Config, UnknownFeaturesAreSuggested) {
  const auto found = [](const char* name) { return problems(with_feature(name, "gemms: fprop")); };
  EXPECT_EQ(found("DisableFp8Gemm"), "") << "an alias";
  EXPECT_NE(found("disablefp8gemm").find("did you mean 'DisableFP8GEMM'?"), std::string::npos);
  EXPECT_NE(found("DisabelFp8Gemm").find("did you mean"), std::string::npos);
  EXPECT_EQ(found("Zzz").find("did you mean"), std::string::npos);
}

std::string selector_problems(std::string_view layers) {
  return problems(
      "s:\n  enabled: yes\n  transformer_engine: {DisableFP8Layer: {enabled: yes}}\n  layers: " +
      std::string(layers));
}

TEST(Config, SelectorMistakes) {
  const auto has = [](std::string_view layers, std::string_view text) {
    const std::string all = selector_problems(layers);
    EXPECT_NE(all.find(text), std::string::npos) << all;
  };
  has("{}", "c.yaml:4:11: s.layers: expected at least one of exact_layer_names, ");
  has("fc1", "s.layers: expected at least one of exact_layer_names, layer_name_regex_pattern");
  has("{layer_names: [a]}", "got 'layer_names'; did you mean 'layer_");
  has("{exact_layer_names: []}",
      "4:31: s.layers.exact_layer_names: expected at least one name, got []");
  for (const char* key : {"layer_types", "layer_numbers"}) {
    has(concat("{", key, ": }"),
        concat("4:12: s.layers.", key, ": expected at least one value, got none"));
  }
  has("{layer_types: []}",
      "(warning) c.yaml:4:25: s.layers.layer_types: expected at least one word, got []: selects "
      "every layer");
  has("{layer_types: [fc1, 2]}",
      "4:31: s.layers.layer_types[1]: expected a non-empty string, got 2");
  has("{layer_types: [fc1, '']}",
      "4:31: s.layers.layer_types[1]: expected a non-empty string, got ''");
  has("{exact_layer_names: ''}", "exact_layer_names[0]: expected a non-empty string, got ''");
  has("{layer_name_regex_pattern: ''}", "expected a non-empty regular expression, got ''");
  has("{layer_name_regex_pattern: '('}", "expected a regular expression of Python, got '(': ");
  has("{layer_name_regex_pattern: [a]}", "expected a non-empty regular expression, got ['a']");
  has("{layer_numbers: [1, 5-2]}",
      "layer_numbers[1]: expected a number, a range like '2-5', or 'all', got '5-2'");
  has("{layer_numbers: -1}", "layer_numbers[0]: expected a number");
  has("{layer_numbers: 1-2-3}", "expected a number");
  has("{layer_name_regex_pattern: a, layer_types: b}",
      "(warning) c.yaml:4:54: s.layers.layer_types: expected nothing beside "
      "layer_name_regex_pattern, "
      "which decides alone: ignored");
}

TEST(Config, SelectorsAreRead) {
  const auto selector = [](std::string_view layers) {
    return load(
               "s: {enabled: yes, transformer_engine: {DisableFP8Layer: {enabled: yes}}, layers: " +
               std::string(layers) + "}")
        .config.sections[0]
        .selector;
  };
  EXPECT_EQ(selector("{layer_types: fc1}").layer_types, std::vector<std::string>({"fc1"}));
  EXPECT_EQ(selector("{exact_layer_names: [a, b]}").exact_layer_names,
            std::vector<std::string>({"a", "b"}));
  EXPECT_EQ(selector("{layer_name_regex_pattern: .*(a|b).*}").layer_name_regex_pattern,
            ".*(a|b).*");
  using Ranges = std::vector<std::pair<int, int>>;
  EXPECT_EQ(selector("{layer_numbers: [1, '2', 3-7, all]}").layer_numbers,
            Ranges({{1, 1}, {2, 2}, {3, 7}, {0, Selector::kEveryNumber}}));
  EXPECT_EQ(selector("{layer_numbers: 4}").layer_numbers, Ranges({{4, 4}}));
  EXPECT_EQ(selector("{layer_numbers: all}").layer_numbers, Ranges({{0, Selector::kEveryNumber}}));
}

TEST(Config, EditDistanceOfSuggestions) {
  EXPECT_EQ(edit_distance("", "abc"), 3);
  EXPECT_EQ(edit_distance("gradeint", "gradient"), 1) << "a swap";
  EXPECT_EQ(edit_distance("MEAN", "mean"), 0);
  EXPECT_EQ(edit_distance("kitten", "sitting"), 3);
  EXPECT_EQ(nearest("activatoin", {"weight", "activation"}), "activation");
  EXPECT_EQ(nearest("x", {"weight", "activation"}), std::nullopt);
  EXPECT_EQ(nearest("", {"a"}), "a");
  EXPECT_EQ(nearest(std::string(100000, 'a'), {"a"}), std::nullopt);
}

TEST(Config, ProblemsWithoutAFileHaveNoPlace) {
  const Node root = [] {
    Node node{.mark = {}, .value = Node::Mapping()};
    node.set("a", {.mark = {}, .value = int64_t{1}});
    return node;
  }();
  const Loaded loaded = load_config(root, "<dict>", feature_rules(), kRegex);
  ASSERT_EQ(loaded.problems.size(), 1U);
  EXPECT_EQ(describe(loaded.problems[0], "<dict>"), "<dict>: a: expected a mapping, got 1");
}

}  // namespace
}  // namespace te::inspect
