// Feeds bytes to the reader of configurations and uses what comes out of it as the engine would.
// Nothing may crash, hang, or throw; every problem must be sayable.
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

// Of this thread, so that a busy machine makes no input slow.
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
  // Patterns of users may take exponential time: that is Python's business. Those of rules are
  // harmless.
  static const RegexSearch regex = [](const std::string& pattern, const std::string& text) {
    return text.empty() || pattern.find(text) != std::string::npos;
  };
  const std::string_view text(reinterpret_cast<const char*>(data), size);
  static Slowest slowest;
  const double began = cpu_seconds();
  const Loaded loaded = load_config(text, "c.yaml", rules, regex);
  slowest.seconds = std::max(slowest.seconds, cpu_seconds() - began);
  use(loaded, rules);
  // The same text gives the same result. One input in eight is enough, the first one among them.
  static unsigned inputs = 0;
  if (inputs++ % 8 != 0) return 0;
  const Loaded again = load_config(text, "c.yaml", rules, regex);
  require(again.config.hash == loaded.config.hash &&
          again.problems.size() == loaded.problems.size());
  return 0;
}
