// For tests: rules of features like those of the debugger, and a search for regular expressions.
#pragma once

#include <regex>
#include <stdexcept>

#include "inspect/config.h"

namespace te::inspect {

inline const RegexSearch kRegex = [](const std::string& pattern, const std::string& text) {
  try {
    return std::regex_search(text, std::regex(pattern));
  } catch (const std::regex_error& error) {
    throw std::invalid_argument(error.what());
  }
};

inline std::vector<FeatureRule> feature_rules() {
  const std::string ns = "transformer_engine";
  const std::vector<std::string> operands = {"activation", "gradient", "weight"};
  const std::vector<std::string> every = {"activation", "gradient", "weight",
                                          "output",     "wgrad",    "dgrad"};
  const std::vector<KeyRule> margin = {{.name = "margin", .kind = "int", .at_most = 127}};
  return {
      {.ns = ns,
       .name = "LogTensorStats",
       .free_form = false,
       .statistics = {"min", "max", "mean", "std", "l1_norm", "l2_norm", "cur_amax",
                      "dynamic_range", "max_blockwise_dynamic_range"},
       .statistic_keys = {{"max_blockwise_dynamic_range",
                           {{.name = "block_size", .kind = "int", .at_least = 1},
                            {.name = "dims", .kind = "int", .at_least = 1, .at_most = 2}}}},
       .tensors = every,
       .scheduled = true},
      {.ns = ns,
       .name = "LogFp8TensorStats",
       .aliases = {"LogFp8Stats"},
       .free_form = false,
       .statistics = {"underflows%", "overflows%",
                      "(fp8_[a-z_]+_)?(underflows%|mse)(_columnwise)?"},
       .tensors = operands,
       .scheduled = true},
      {.ns = ns,
       .name = "DisableFP8GEMM",
       .aliases = {"DisableFp8Gemm"},
       .free_form = false,
       .takes_gemms = true},
      {.ns = ns, .name = "DisableFP8Layer", .aliases = {"DisableFp8Layer"}, .free_form = false},
      {.ns = ns,
       .name = "PerTensorScaling",
       .free_form = false,
       .keys = margin,
       .tensors = operands,
       .takes_gemms = true,
       .conflicts = {"FakeQuant"}},
      {.ns = ns,
       .name = "FakeQuant",
       .free_form = false,
       .keys = {margin[0],
                {.name = "quant_format",
                 .kind = "choice",
                 .choices = {"FP8E4M3", "FP8E5M2"},
                 .required = true}},
       .tensors = every,
       .takes_gemms = true},
      {.ns = ns, .name = "Custom"},
      {.ns = "base",
       .name = "LogTensorStats",
       .free_form = false,
       .statistics = {"min", "max"},
       .any_tensors = true,
       .scheduled = true},
  };
}

inline Loaded load(std::string_view text) {
  return load_config(text, "c.yaml", feature_rules(), kRegex);
}

// All problems of a text, one on each line. Warnings begin with "(warning) ".
inline std::string problems(std::string_view text) {
  std::string all;
  for (const Problem& problem : load(text).problems) {
    if (problem.severity == Severity::Warning) all += "(warning) ";
    all += describe(problem, "c.yaml") + "\n";
  }
  return all;
}

// A section `s` for every layer, with one feature of Transformer Engine, whose body begins at 6:7.
inline std::string with_feature(std::string_view feature, std::string_view body) {
  return "s:\n  enabled: yes\n  layers: {layer_types: all}\n  transformer_engine:\n    " +
         std::string(feature) + ":\n      {enabled: yes, " + std::string(body) + "}\n";
}

}  // namespace te::inspect
