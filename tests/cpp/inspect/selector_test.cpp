#include "inspect/selector.h"

#include <gtest/gtest.h>

#include "inspect/rules.h"

namespace te::inspect {
namespace {

const std::vector<std::string> kLayers = {
    "transformer_layer.self_attention.layernorm_qkv",
    "transformer_layer.self_attention.proj",
    "transformer_layer.layernorm_mlp.fc1",
    "transformer_layer.layernorm_mlp.fc2",
};

// The layers of kLayers that a selector matches, as a bit mask (bit i for kLayers[i]).
int matched(const Selector& selector) {
  int mask = 0;
  for (size_t i = 0; i < kLayers.size(); ++i) mask |= selector.matches(kLayers[i], kRegex) << i;
  return mask;
}

TEST(Selector, ExamplesOfTheDocumentationMatch) {
  EXPECT_EQ(matched({.layer_types = {{"fc1", "fc2"}}}), 0b1100);
  EXPECT_EQ(matched({.layer_types = {{"layernorm_linear"}}}), 0b0001);
  EXPECT_EQ(matched({.layer_name_regex_pattern = ".*(fc1|self_attention).*"}), 0b0111);
  EXPECT_EQ(matched({.layer_types = {{"fc1"}}}), 0b0100);
  EXPECT_EQ(matched({.layer_types = {{"transformer_layer.self_attn.layernorm_q"}}}), 0b0001);
  EXPECT_EQ(matched({.layer_types = {{"transformer_layer.layernorm_mlp.fc1"}}}), 0b0100);
}

TEST(Selector, FormsThatUsersHave) {
  EXPECT_EQ(matched({.layer_types = {{"linear"}}}), 0b0001);
  EXPECT_EQ(matched({.layer_types = {{"qkv", "fc2"}}}), 0b1001);
  EXPECT_EQ(matched({.layer_types = {{"all"}}}), 0b1111);
  EXPECT_EQ(matched({.layer_types = {std::vector<std::string>()}}), 0b1111);
  EXPECT_EQ(matched({.exact_layer_names = {kLayers[1], "other"}}), 0b0010);
  EXPECT_EQ(matched({.exact_layer_names = {"transformer_layer.self_attn.layernorm_linear_qkv"}}),
            0b0001);
  EXPECT_EQ(matched({.layer_name_regex_pattern = "^transformer_layer\\.self_attn\\.(?!proj)"}),
            0b0001);
  EXPECT_EQ(matched({}), 0);
}

TEST(Selector, PatternsThatExcludeLayers) {
  const auto of = [](const char* pattern) {
    return matched({.layer_name_regex_pattern = pattern});
  };
  EXPECT_EQ(of("^(?!.*self_attention)"), 0b1100);
  EXPECT_EQ(of("^(?!.*layernorm_qkv)"), 0b1110);
  EXPECT_EQ(of("^((?!attention).)*$"), 0b1100);
  EXPECT_EQ(of(".*\\.(?!fc1|fc2|layernorm_qkv)\\w+$"), 0b0010);
  EXPECT_EQ(of("self_attn\\.(?!layernorm_qkv)"), 0b0010);
  EXPECT_EQ(of("layernorm_linear"), 0b0001);
  EXPECT_EQ(of(".*(self|inter)_attn.*"), 0b0011) << "nothing is excluded: any alias is known";
}

TEST(Selector, Precedence) {
  EXPECT_EQ(matched({.exact_layer_names = {kLayers[1]},
                     .layer_name_regex_pattern = "fc1",
                     .layer_types = {{"fc2"}}}),
            0b0010);
  EXPECT_EQ(matched({.layer_name_regex_pattern = "fc1",
                     .layer_types = {{"fc2"}},
                     .layer_numbers = {{{7, 7}}}}),
            0b0100);
}

TEST(Selector, NumbersOfLayers) {
  const auto numbered = [](std::string_view layer, std::pair<int, int> range) {
    return Selector{.layer_numbers = {{range}}}.matches(layer, kRegex);
  };
  EXPECT_TRUE(numbered("model.layers.3.layernorm_mlp.fc1", {3, 3}));
  EXPECT_TRUE(numbered("model.layers.12.layernorm_mlp.fc2", {10, 20}));
  EXPECT_FALSE(numbered("model.layers.12.layernorm_mlp.fc2", {2, 2}));
  EXPECT_FALSE(numbered("model.layernorm_mlp.fc12", {0, 100})) << "fc12 has no layer number";
  EXPECT_TRUE(numbered("model.layers.3.experts.gemm_5", {3, 3})) << "a part of a GroupedLinear";
  EXPECT_FALSE(numbered("model.2.layers.3", {0, 100})) << "two numbers are none";
  EXPECT_FALSE(numbered("model.99999999999999999999", {0, 100}));
  EXPECT_TRUE(numbered("model.2.layers.3", {0, Selector::kEveryNumber}));
  const Selector both{.layer_types = {{"fc1"}}, .layer_numbers = {{{1, 2}, {5, 5}}}};
  EXPECT_TRUE(both.matches("m.5.fc1", kRegex));
  EXPECT_FALSE(both.matches("m.5.fc2", kRegex));
  EXPECT_FALSE(both.matches("m.4.fc1", kRegex));
}

TEST(Selector, NamesOfALayer) {
  EXPECT_EQ(names_of_layer("a.fc1"), std::vector<std::string>({"a.fc1"}));
  EXPECT_EQ(names_of_layer("self_attention"),
            std::vector<std::string>({"self_attention", "self_attn"}));
  EXPECT_EQ(names_of_layer("m.self_attention.qkv"),
            std::vector<std::string>({"m.self_attention.qkv", "m.self_attn.qkv",
                                      "m.self_attention.linear_qkv", "m.self_attn.linear_qkv"}));
  EXPECT_EQ(names_of_layer("inter_attention.layernorm_query").back(),
            "inter_attention.layernorm_linear_q");
  EXPECT_EQ(names_of_layer("query").back(), "linear_q");
  EXPECT_EQ(names_of_layer("key_value").back(), "linear_kv");
  EXPECT_EQ(names_of_layer("my_qkv.qkv_2").size(), 1U) << "only whole components have aliases";
  EXPECT_EQ(names_of_layer("self_attention.qkv", "self_attn"),
            std::vector<std::string>({"self_attention.qkv", "self_attn.qkv"}));
  EXPECT_EQ(names_of_layer("self_attention.qkv", "attention").size(), 1U);
  EXPECT_EQ(names_of_layer("").front(), "");
  EXPECT_EQ(names_of_layer("a..b.").front(), "a..b.");
  std::string deep = "qkv";
  for (int i = 0; i < 40; ++i) deep += ".qkv";
  EXPECT_EQ(names_of_layer(deep).size(), 256U);
  EXPECT_EQ(names_of_layer(deep).front(), deep);
}

}  // namespace
}  // namespace te::inspect
