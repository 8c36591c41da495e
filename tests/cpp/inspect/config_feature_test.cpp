// Bodies of features: what is legal, the messages about mistakes, and the configuration for a
// tensor and gemm.
#include <gtest/gtest.h>

#include "core/error.h"
#include "inspect/config.h"
#include "inspect/config_yaml.h"
#include "inspect/rules.h"

namespace te::inspect {
namespace {

using Name = std::optional<std::string_view>;

void expect_problem(std::string_view feature, std::string_view body, std::string_view expected) {
  const std::string all = problems(with_feature(feature, body));
  EXPECT_NE(all.find(expected), std::string::npos) << body << "\n" << all;
}

// The configuration of the first feature for a tensor and gemm, as text; "-" if it does not cover
// them.
std::string said(const std::string& text, Name gemm, Name tensor) {
  const Loaded loaded = load(text);
  EXPECT_FALSE(loaded.has_errors()) << problems(text);
  const FeatureUse& use = loaded.config.sections.at(0).uses.at(0);
  const auto config =
      config_for(use, *find_rule(feature_rules(), use.ns, use.feature), gemm, tensor);
  if (!config) return "-";
  std::string all;
  for (const auto& [key, value] : config->as_mapping())
    all += key.as_string() + "=" + brief(value) + " ";
  return all;
}

TEST(FeatureConfig, NamesAreChecked) {
  expect_problem("LogTensorStats", "stats: [max, maen], tensors: weight",
                 "c.yaml:6:35: s.transformer_engine.LogTensorStats.stats[1]: expected one of min, "
                 "max, mean, std, l1_norm, l2_norm, cur_amax, dynamic_range, "
                 "max_blockwise_dynamic_range, got 'maen'; did you mean 'mean'?");
  expect_problem("LogTensorStats", "stats: Max, tensors: weight", "stats: expected one of");
  expect_problem(
      "LogTensorStats", "stats: max, tensors: [activaton]",
      "tensors[0]: expected one of activation, gradient, weight, output, wgrad, dgrad, got "
      "'activaton'; did you mean 'activation'?");
  expect_problem("LogFp8TensorStats", "stats: mse, tensors: output",
                 "expected one of activation, gradient, weight, got 'output'");
  expect_problem(
      "DisableFP8GEMM", "gemms: [fporp]",
      "gemms[0]: expected one of fprop, dgrad, wgrad, got 'fporp'; did you mean 'fprop'?");
  expect_problem("DisableFP8GEMM", "gems: [fprop]",
                 "6:22: s.transformer_engine.DisableFP8GEMM.gems: expected one of gemms, "
                 "gemms_struct, got 'gems'; did you mean 'gemms'?");
  expect_problem("DisableFP8GEMM", "gems: [fprop]",
                 "expected the key gemms or gemms_struct, got neither");
  expect_problem("DisableFP8Layer", "freq: 1", "freq: expected nothing, got 'freq'");
  expect_problem("FakeQuant", "gemms: fprop, tensors: weight, quant_format: FP8E4M4",
                 "expected one of FP8E4M3, FP8E5M2, got 'FP8E4M4'; did you mean 'FP8E4M3'?");
  expect_problem("FakeQuant", "gemms: fprop, tensors: weight, quant_format: FP8E4M3, margin: 1.5",
                 "margin: expected an int of at most 127, got 1.5");
  expect_problem("FakeQuant", "gemms: fprop, tensors: weight, quant_format: FP8E4M3, margin: 128",
                 "margin: expected an int of at most 127, got 128");
  EXPECT_EQ(
      problems(with_feature("FakeQuant", "gemms: fprop, tensors: weight, quant_format: fp8e4m3")),
      "");
  EXPECT_EQ(problems(with_feature("LogFp8Stats",
                                  "stats: [fp8_block_scaling_mse_columnwise], tensors: weight")),
            "");
}

TEST(FeatureConfig, WhatIsMissing) {
  expect_problem("LogTensorStats", "tensors: [weight]", "expected the key stats, got none");
  expect_problem("LogTensorStats", "stats: [max]",
                 "expected the key tensors or tensors_struct, got none");
  expect_problem("LogTensorStats", "stats: [], tensors: weight",
                 "expected at least one statistic, got none");
  expect_problem("LogTensorStats",
                 "tensors_struct: [{tensor: weight}, {tensor: gradient, stats: max}]",
                 "expected the key stats");
  expect_problem("FakeQuant", "gemms: [fprop], tensors: [weight]",
                 "expected the key quant_format, got none");
  expect_problem("FakeQuant", "gemms_struct: [{gemm: fprop}], quant_format: FP8E4M3",
                 "expected the key tensors or tensors_struct for gemm fprop, got none");
  expect_problem("FakeQuant", "gemms_struct: [{tensors: weight}], quant_format: FP8E4M3",
                 "gemms_struct[0]: expected the key gemm, got {");
  expect_problem("Custom", "tensors_struct: [{k: 1}]",
                 "tensors_struct[0]: expected the key tensor, got {'k': 1}");
  expect_problem("Custom", "tensors_struct: {tensor: weight}",
                 "tensors_struct: expected a list of mappings");
  expect_problem("Custom", "gemms_struct: [{gemm: fprop}, {gemm: fprop}]",
                 "expected each gemm once, got 'fprop' again");
  EXPECT_EQ(
      problems(
          "s: {enabled: yes, layers: {layer_types: x}, transformer_engine: {DisableFP8Layer: {}}}"),
      "c.yaml:1:66: s.transformer_engine.DisableFP8Layer: expected the key enabled, got none\n");
  EXPECT_EQ(
      problems(
          "s: {enabled: yes, layers: {layer_types: x}, transformer_engine: {DisableFP8Layer: }}"),
      "c.yaml:1:66: s.transformer_engine.DisableFP8Layer: expected keys in it, indented deeper "
      "than "
      "its name, got none\n");
}

TEST(FeatureConfig, ListsWithoutNames) {
  const auto found = [](const std::string& feature, const std::string& body) {
    return problems(with_feature(feature, body));
  };
  for (const char* key : {"gemms", "tensors"}) {
    const std::string said = concat(key, ": expected at least one name, got ");
    EXPECT_NE(found("FakeQuant", concat(key, ": ~, margin: 0")).find("FakeQuant." + said + "null"),
              std::string::npos);
    EXPECT_NE(found("Custom", concat(key, ": ~")).find("Custom." + said + "null"),
              std::string::npos);
    EXPECT_EQ(found("Custom", concat(key, ": ~")).find("(warning)"), 0U);
    EXPECT_EQ(found("Custom", concat(key, ": []")).find("(warning)"), 0U);
  }
  EXPECT_EQ(found("LogTensorStats", "stats: [max], tensors: []"),
            "(warning) c.yaml:6:45: s.transformer_engine.LogTensorStats.tensors: expected at "
            "least one name, got []\n");
  EXPECT_EQ(found("LogTensorStats", "stats: [max], tensors: "),
            "c.yaml:6:45: s.transformer_engine.LogTensorStats.tensors: expected at least one "
            "name, got null\n");
}

TEST(FeatureConfig, KeysOfStatisticsAreChecked) {
  const auto of_blocks = [](const std::string& keys) {
    return problems(with_feature(
        "LogTensorStats", "tensors: weight, stats: [max_blockwise_dynamic_range: " + keys + "]"));
  };
  EXPECT_EQ(of_blocks("{block_size: 16, dims: 2}") + of_blocks("{dims: ~}") + of_blocks("~"), "");
  const std::string path =
      ": s.transformer_engine.LogTensorStats.stats[0].max_blockwise_dynamic_range";
  EXPECT_EQ(of_blocks("{dims: 3}"), "c.yaml:6:83" + path +
                                        ".dims: expected an int of at least 1 and at most 2, "
                                        "got 3\n");
  EXPECT_EQ(of_blocks("{block_size: 0}"),
            "c.yaml:6:89" + path + ".block_size: expected an int of at least 1, got 0\n");
  EXPECT_EQ(
      of_blocks("{block: 16}"),
      "c.yaml:6:77" + path +
          ".block: expected one of block_size, dims, got 'block'; did you mean 'block_size'?\n");
  EXPECT_EQ(of_blocks("16"), "c.yaml:6:76" + path + ": expected a mapping, got 16\n");
  for (const char* stats : {"{max: 1}", "{max: ~}", "[{max: {dims: 1}}]"}) {
    expect_problem("LogTensorStats", concat("tensors: weight, stats: ", stats),
                   "expected max without keys, got {'max': ");
  }
  expect_problem("LogTensorStats", "tensors: weight, stats: [{max: 1, min: 1}]",
                 "stats[0]: expected the name of a statistic, got {'max': 1, 'min': 1}");
}

TEST(FeatureConfig, EveryGemmNeedsTensors) {
  for (const char* body : {"gemms_struct: [{gemm: fprop}, {gemm: dgrad, tensors: [weight]}]",
                           "gemms: fprop, gemms_struct: [{gemm: dgrad, tensors: [weight]}]"}) {
    EXPECT_EQ(problems(with_feature("PerTensorScaling", body)),
              "c.yaml:6:7: s.transformer_engine.PerTensorScaling: expected the key tensors or "
              "tensors_struct for gemm fprop, got none\n");
  }
}

TEST(FeatureConfig, NamesThatLayersDoNotHaveWarn) {
  const auto found = [](const std::string& feature, const std::string& body) {
    return problems("s:\n  enabled: yes\n  layers: {layer_types: all}\n  " + feature +
                    "enabled: yes, " + body + "}");
  };
  EXPECT_EQ(found("transformer_engine:\n    Custom: {", "gemms: [forward], tensors: [act]"),
            "(warning) c.yaml:5:36: s.transformer_engine.Custom.gemms[0]: expected one of fprop, "
            "dgrad, wgrad, got 'forward'\n"
            "(warning) c.yaml:5:56: s.transformer_engine.Custom.tensors[0]: expected one of "
            "activation, weight, gradient, output, wgrad, dgrad, got 'act'; did you mean "
            "'activation'?\n");
  const std::string base = "base:\n    LogTensorStats: {stats: max, ";
  EXPECT_EQ(found(base, "gemms: [forward], tensors: [act]"), "");
  EXPECT_EQ(found(base, "tensors: wieght").find("(warning)"), 0U);
  EXPECT_NE(found(base, "tensors: wieght").find("did you mean 'weight'?"), std::string::npos);
}

TEST(FeatureConfig, TensorsOfTheProgram) {
  const auto found = [](const std::string& body) {
    return problems(
        "s:\n  enabled: yes\n  layers: {layer_types: all}\n  base:\n    "
        "LogTensorStats: {enabled: yes, stats: max, " +
        body + "}");
  };
  EXPECT_EQ(found("frequency: 2, tensors: logits"),
            "c.yaml:5:48: s.base.LogTensorStats.frequency: expected one of gemms, gemms_struct, "
            "tensors, tensors_struct, "
            "stats, freq, start_step, end_step, start_end_list, got 'frequency'; did you "
            "mean 'freq'?\n");
  EXPECT_NE(found("tensors_struct: [{tensor: logits, stat: min}]")
                .find("tensors_struct[0].stat: expected one of tensor, stats, freq"),
            std::string::npos);
  EXPECT_EQ(found("freq: 2"),
            "c.yaml:5:21: s.base.LogTensorStats: expected the key tensors or "
            "tensors_struct, got none\n");
  EXPECT_EQ(found("tensors_struct: [{tensor: logits, stats: min}], tensors: [x, weight]"), "");
}

TEST(FeatureConfig, SchedulesAreChecked) {
  const auto expect = [](std::string_view keys, std::string_view problem) {
    for (const char* feature : {"LogTensorStats", "Custom"}) {
      expect_problem(feature, "stats: [max], tensors: [weight], " + std::string(keys), problem);
    }
  };
  expect("freq: 0", "freq: expected an integer of at least 1, got 0");
  expect("freq: 2.0", "freq: expected an integer of at least 1, got 2.0");
  expect("freq: 1.5", "freq: expected an integer of at least 1, got 1.5");
  expect("freq: yes", "freq: expected an integer of at least 1, got true");
  expect("start_step: -1", "start_step: expected an integer of at least 0, got -1");
  expect("end_step: -2", "end_step: expected an integer of at least 0, or -1 for no end, got -2");
  expect("start_step: 5, end_step: 4", "end_step: expected at least start_step, 5, got 4");
  expect("start_step: 5, tensors_struct: [{tensor: gradient, end_step: 4}]",
         "end_step: expected at least start_step, 5, got 4");
  expect("start_end_list: [0, 5]",
         "start_end_list[0]: expected a pair [start, end] of integers, got 0");
  expect("start_end_list: 3", "start_end_list: expected a list of [start, end] pairs, got 3");
  expect("start_end_list: [[5, 4]]", "start_end_list[0]: expected 0 <= start <= end, got [5, 4]");
  expect("start_end_list: [[10, 20], [0, 5]]",
         "start_end_list[1]: expected a start after 20, the end of the pair before, got [0, 5]");
  expect("start_end_list: [[0, 5], [5, 9]]", "start_end_list[1]: expected a start after 5");
  expect("start_end_list: [[0, -1], [5, 9]]",
         "start_end_list[0]: expected 0 <= start <= end, got [0, -1]");
  EXPECT_EQ(problems(with_feature("LogTensorStats",
                                  "stats: max, tensors: weight, freq: ~, start_step: 7, end_step: "
                                  "-1, start_end_list: [[0, 0], [2, -1]]")),
            "");
  EXPECT_EQ(problems(with_feature("LogTensorStats",
                                  "stats: max, tensors: weight, start_step: 7, end_step: 5, "
                                  "start_end_list: [[0, 3]]")),
            "");
}

TEST(FeatureConfig, SchedulesAreRead) {
  const auto schedule = [](std::string_view text) { return schedule_of(parse_yaml(text)); };
  EXPECT_EQ(schedule("{}"), Schedule());
  EXPECT_EQ(schedule("{freq: ~, start_step: ~, end_step: ~, start_end_list: ~}"), Schedule());
  EXPECT_EQ(schedule("{freq: 3, start_step: 2, end_step: 5}"),
            (Schedule{.freq = 3, .intervals = {{2, 5}}}));
  EXPECT_EQ(schedule("{start_step: 2, end_step: -1}"),
            (Schedule{.intervals = {{2, Schedule::kNoEnd}}}));
  EXPECT_EQ(schedule("{start_step: 2, end_step: 5, start_end_list: [[0, 20], [80, -1]]}"),
            (Schedule{.intervals = {{0, 20}, {80, Schedule::kNoEnd}}}));
  EXPECT_EQ(schedule("{start_step: 2, start_end_list: []}"),
            (Schedule{.intervals = {{2, Schedule::kNoEnd}}}));
}

TEST(FeatureConfig, Conflicts) {
  const auto both = [](std::string_view fake_quant, std::string_view scaling) {
    return problems(
        "s:\n  enabled: yes\n  layers: {layer_types: all}\n  transformer_engine:\n"
        "    FakeQuant: {enabled: yes, quant_format: FP8E4M3, " +
        std::string(fake_quant) + "}\n    PerTensorScaling: {enabled: yes, " +
        std::string(scaling) + "}\n");
  };
  EXPECT_EQ(both("gemms: [fprop], tensors: [weight]", "gemms: [fprop], tensors: [activation]"), "");
  EXPECT_EQ(both("gemms: [fprop], tensors: [weight]", "gemms: [dgrad], tensors: [weight]"), "");
  EXPECT_EQ(
      both("gemms: [fprop], tensors: [weight]", "gemms_struct: [{gemm: fprop, tensors: weight}]"),
      "c.yaml:6:5: s.transformer_engine.PerTensorScaling: expected one of FakeQuant and "
      "PerTensorScaling on weight in fprop, got both\n");
  const auto twice = [](std::string_view first, std::string_view second) {
    return problems(
        "s: {enabled: yes, layers: {layer_types: x}, transformer_engine: {DisableFP8GEMM: "
        "{enabled: yes, gemms: " +
        std::string(first) + "}, DisableFp8Gemm: {enabled: yes, gemms: " + std::string(second) +
        "}}}");
  };
  EXPECT_EQ(twice("fprop", "[dgrad, wgrad]"), "");
  EXPECT_NE(
      twice("fprop", "[dgrad, fprop]")
          .find(
              "expected one of DisableFP8GEMM and DisableFp8Gemm on activation in fprop, got both"),
      std::string::npos);
}

TEST(FeatureConfig, PairsThatAreNoOperandsWarnOnce) {
  const std::string text =
      with_feature("PerTensorScaling", "margin: 1, gemms: [dgrad], tensors: [weight, activation]");
  EXPECT_EQ(problems(text),
            "(warning) c.yaml:5:5: s.transformer_engine.PerTensorScaling: expected operands of the "
            "GEMMs, got "
            "activation in dgrad, which those GEMMs do not take: those stay as they are\n");
  EXPECT_EQ(said(text, "dgrad", "weight"), "margin=1 gemm='dgrad' tensor='weight' ");
  EXPECT_EQ(said(text, "dgrad", "activation"), "-");
  EXPECT_EQ(said(text, "fprop", "weight"), "-");
}

TEST(FeatureConfig, ListsNameAllPairsThatThereAre) {
  EXPECT_EQ(problems(with_feature("PerTensorScaling",
                                  "gemms: [fprop, dgrad], tensors: [activation, gradient]")),
            "");
  EXPECT_EQ(
      problems(with_feature("PerTensorScaling", "gemms: [fprop, dgrad], tensors: [activation]")),
      "(warning) c.yaml:5:5: s.transformer_engine.PerTensorScaling: expected operands of the "
      "GEMMs, got activation in dgrad, which those GEMMs do not take: those stay as they are\n");
  const std::string structs =  // here the user has written the pair explicitly
      "gemms_struct: [{gemm: fprop, tensors: [activation]}, "
      "{gemm: dgrad, tensors: [activation, gradient]}]";
  EXPECT_NE(problems(with_feature("PerTensorScaling", structs)).find("got activation in dgrad"),
            std::string::npos);
}

TEST(FeatureConfig, StatisticsOfOtherFeaturesAreToldWhereTheyBelong) {
  expect_problem("LogTensorStats", "tensors: [weight], stats: [max, underflows%]",
                 "stats[1]: expected a statistic of LogTensorStats, got 'underflows%', which "
                 "belongs under LogFp8TensorStats");
  expect_problem("LogFp8TensorStats", "tensors: [weight], stats: [std]",
                 "stats[0]: expected a statistic of LogFp8TensorStats, got 'std', which belongs "
                 "under LogTensorStats");
}

TEST(FeatureConfig, EveryShapeOfTheLists) {
  const std::string plain =
      with_feature("FakeQuant", "quant_format: FP8E4M3, gemms: [fprop, dgrad], tensors: weight");
  EXPECT_EQ(said(plain, "dgrad", "weight"), "quant_format='FP8E4M3' gemm='dgrad' tensor='weight' ");
  EXPECT_EQ(said(plain, "fprop", std::nullopt), "quant_format='FP8E4M3' gemm='fprop' ")
      << "fp8_gemm_enabled";
  EXPECT_EQ(said(plain, std::nullopt, "weight"), "quant_format='FP8E4M3' tensor='weight' ");
  EXPECT_EQ(said(plain, "wgrad", std::nullopt), "-");
  EXPECT_EQ(said(plain, "fprop", "activation"), "-");

  const std::string inner =
      with_feature("FakeQuant",
                   "quant_format: FP8E4M3, margin: 0, gemms: [wgrad], tensors_struct: [{tensor: "
                   "gradient, margin: 3}], gemms_struct: "
                   "[{gemm: fprop, margin: 1, tensors_struct: [{tensor: weight, margin: 2}, "
                   "{tensor: activation}]}, {gemm: dgrad, quant_format: FP8E5M2}]");
  EXPECT_EQ(said(inner, "fprop", "weight"),
            "quant_format='FP8E4M3' margin=2 gemm='fprop' tensor='weight' ");
  EXPECT_EQ(said(inner, "fprop", "activation"),
            "quant_format='FP8E4M3' margin=1 gemm='fprop' tensor='activation' ");
  EXPECT_EQ(said(inner, "dgrad", "gradient"),
            "quant_format='FP8E5M2' margin=3 gemm='dgrad' tensor='gradient' ")
      << "an item without tensors takes the outer ones";
  EXPECT_EQ(said(inner, "wgrad", "gradient"),
            "quant_format='FP8E4M3' margin=3 gemm='wgrad' tensor='gradient' ");
  EXPECT_EQ(said(inner, "wgrad", "activation"), "-");
  EXPECT_EQ(said(inner, std::nullopt, "activation"),
            "quant_format='FP8E4M3' margin=1 tensor='activation' ")
      << "a call without gemm finds the tensors of a gemm";
}

TEST(FeatureConfig, HooksWithoutGemmIgnoreGemms) {
  const std::string text =
      with_feature("LogFp8TensorStats", "stats: mse, tensors: [weight], gemms: [fprop]");
  EXPECT_EQ(said(text, std::nullopt, "weight"), "stats=['mse'] tensor='weight' ");
  EXPECT_EQ(said(text, "fprop", "weight"), "stats=['mse'] gemm='fprop' tensor='weight' ");
  EXPECT_EQ(said(text, "dgrad", "weight"), "-");
  const std::string free = with_feature("Custom", "any: {a: [1]}");
  EXPECT_EQ(said(free, "dgrad", "weight"), "any={'a': [1]} ") << "no lists: everything";
  EXPECT_EQ(said(free, std::nullopt, std::nullopt), "any={'a': [1]} ");
}

}  // namespace
}  // namespace te::inspect
