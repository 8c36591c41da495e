// The examples of the documentation, which are files in tests/fuzz/corpus: each loads, selects
// layers, and has the expected configuration.
#include <gtest/gtest.h>

#include <filesystem>
#include <fstream>
#include <iterator>
#include <map>

#include "inspect/gemm_names.h"
#include "inspect/rules.h"

namespace te::inspect {
namespace {

const std::vector<std::string> kLayers = {
    "transformer_layer.self_attention.layernorm_qkv", "transformer_layer.self_attention.proj",
    "transformer_layer.layernorm_mlp.fc1", "transformer_layer.layernorm_mlp.fc2"};

std::string read(const std::string& name) {
  std::ifstream stream(std::string(TE_CORPUS) + "/" + name + ".yaml");
  return {std::istreambuf_iterator<char>(stream), std::istreambuf_iterator<char>()};
}

// Maps "layer gemm tensor" to the number of iterations of 0..120 that are due. The layer is given
// by the last part of its name.
std::map<std::string, int> due(const Loaded& loaded, bool with_gemm) {
  const std::vector<FeatureRule> rules = feature_rules();
  std::map<std::string, int> counts;
  for (const std::string& layer : kLayers) {
    for (const Section& section : loaded.config.sections) {
      if (!section.selector.matches(layer, kRegex)) continue;
      for (const FeatureUse& use : section.uses) {
        const FeatureRule& rule = *find_rule(rules, use.ns, use.feature);
        for (const std::string_view gemm : kGemms) {
          for (const std::string_view tensor : kTensors) {
            if (with_gemm && !takes_or_gives(gemm, tensor)) continue;
            std::optional<std::string_view> asked;
            if (with_gemm) asked = gemm;
            const auto config = config_for(use, rule, asked, tensor);
            if (!config) continue;
            int& count = counts[layer.substr(layer.rfind('.') + 1) + " " +
                                (with_gemm ? std::string(gemm) + " " : "") + std::string(tensor)];
            count = 0;
            for (int i = 0; i <= 120; ++i) count += schedule_of(*config).due(i);
          }
        }
      }
    }
  }
  return counts;
}

using Counts = std::map<std::string, int>;

Loaded load_example(const std::string& name, const std::string& expected_problems = "") {
  const std::string text = read(name);
  EXPECT_FALSE(text.empty()) << name;
  EXPECT_EQ(problems(text), expected_problems) << name;
  return load(text);
}

TEST(SeedExamples, GettingStarted) {
  const Loaded loaded = load_example("getting_started");
  EXPECT_EQ(loaded.config.names(),
            std::vector<std::string>({"fc1_fprop_to_fp8", "log_tensor_stats"}));
  Loaded disable = loaded, log = loaded;
  disable.config.sections.pop_back();
  log.config.sections.erase(log.config.sections.begin());
  EXPECT_EQ(due(disable, true).size(), 6U) << "fprop's two operands and result, in fc1 and fc2";
  EXPECT_EQ(due(log, false), Counts({{"layernorm_qkv activation", 4}})) << "iterations 2 to 5";
}

TEST(SeedExamples, Statistics) {
  EXPECT_EQ(due(load_example("tensor_stat_collection"), false),
            Counts({{"layernorm_qkv activation", 10},
                    {"layernorm_qkv gradient", 22},
                    {"layernorm_qkv weight", 121},
                    {"proj activation", 10},
                    {"proj gradient", 22},
                    {"proj weight", 121},
                    {"fc1 activation", 10},
                    {"fc1 gradient", 22},
                    {"fc1 weight", 121}}));
  EXPECT_EQ(due(load_example("fp8_tensor_stat_collection"), false),
            Counts({{"layernorm_qkv activation", 81}, {"layernorm_qkv gradient", 17}}));
}

TEST(SeedExamples, Precision) {
  EXPECT_EQ(due(load_example("disable_fp8_gemm"), true).size(), 6U) << "dgrad and wgrad of fc1";
  EXPECT_EQ(due(load_example("disable_fp8_layer"), true).size(), 9U) << "all of fc1";
  EXPECT_EQ(due(load_example("fake_quant_fp8"), true), Counts({{"fc1 fprop activation", 121},
                                                               {"fc1 fprop weight", 121},
                                                               {"fc1 dgrad gradient", 121}}));
  EXPECT_EQ(due(load_example("per_tensor_scaling",
                             "(warning) c.yaml:6:7: example_per_tensor_scaling.transformer_engine."
                             "PerTensorScaling: expected operands of the GEMMs, got activation in "
                             "dgrad, which those GEMMs do not take: those stay as they are\n"),
                true),
            Counts({{"layernorm_qkv dgrad weight", 121}}));
}

}  // namespace
}  // namespace te::inspect
