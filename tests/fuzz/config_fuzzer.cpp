// Fuzz target for the parser of configurations: parses arbitrary bytes and uses the result as the
// debugger's engine does. No input may crash, hang or throw, and every problem must have a message
// and a position. libFuzzer or mutate_main.cpp calls LLVMFuzzerTestOneInput.
#include <algorithm>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <ctime>
#include <string_view>

#include "inspect/config.h"
#include "inspect/gemm_names.h"
#include "inspect/rules.h"

namespace te::inspect {
namespace {

void require(bool condition) {
  if (!condition) std::abort();
}

// CPU time of this thread, so that no input looks slow because the machine is busy.
double cpu_seconds() {
  timespec now{};
  clock_gettime(CLOCK_THREAD_CPUTIME_ID, &now);
  return static_cast<double>(now.tv_sec) + 1e-9 * static_cast<double>(now.tv_nsec);
}

// Prints the slowest input when the process ends.
struct Slowest {
  double seconds = 0.0;
  ~Slowest() {
    std::fprintf(stderr, "slowest: %.1f ms of CPU time, built with %s\n", 1e3 * seconds,
                 TE_SANITIZE);
  }
};

void use(const Loaded& loaded, const std::vector<FeatureRule>& rules) {
  for (const Problem& problem : loaded.problems) {
    require(!describe(problem, "c.yaml").empty());
    require(problem.at.line >= 0 && problem.at.column >= 0);
  }
  for (const Section& section : loaded.config.sections) {
    section.selector.matches("transformer_layer.3.self_attention.layernorm_qkv",
                             [](const auto& pattern, const auto& text) { return pattern == text; });
    for (const FeatureUse& use : section.uses) {
      const FeatureRule* rule = find_rule(rules, use.ns, use.feature);
      require(rule != nullptr);
      for (const std::string_view gemm : kGemms) {
        for (const std::string_view tensor : kTensors) {
          const auto config = config_for(use, *rule, gemm, tensor);
          if (config) schedule_of(*config).next(100);
        }
      }
    }
  }
}

}  // namespace
}  // namespace te::inspect

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  using namespace te::inspect;
  static const std::vector<FeatureRule> rules = feature_rules();
  // A stand-in for Python's regular expressions. Patterns in an input may take exponential time,
  // which would not be a fault of the code under test.
  static const RegexSearch regex = [](const std::string& pattern, const std::string& text) {
    return text.empty() || pattern.find(text) != std::string::npos;
  };
  const std::string_view text(reinterpret_cast<const char*>(data), size);
  static Slowest slowest;
  const double began = cpu_seconds();
  const Loaded loaded = load_config(text, "c.yaml", rules, regex);
  slowest.seconds = std::max(slowest.seconds, cpu_seconds() - began);
  use(loaded, rules);
  // The same text must give the same result. To save time, one input in eight is parsed twice.
  static unsigned inputs = 0;
  if (inputs++ % 8 != 0) return 0;
  const Loaded again = load_config(text, "c.yaml", rules, regex);
  require(again.config.hash == loaded.config.hash &&
          again.problems.size() == loaded.problems.size());
  return 0;
}
