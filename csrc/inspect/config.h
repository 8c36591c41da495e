// The configuration after it was read and checked: sections that select layers, and the features of
// each section.
#pragma once

#include <cstdint>
#include <map>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "inspect/node.h"
#include "inspect/schedule.h"
#include "inspect/selector.h"

namespace te::inspect {

// A key in the declared configuration of a feature class.
struct KeyRule {
  std::string name;
  std::string kind;                       // "bool", "int", "number", "string", "choice", "any"
  std::vector<std::string> choices = {};  // of "choice"; compared without case
  bool required = false;
  // Bounds of "int".
  std::optional<int64_t> at_least = {};
  std::optional<int64_t> at_most = {};
};

// The declared configuration of a feature class. For a class without a declaration (`free_form`),
// only selectors, gemms, tensors and schedules are checked, and other keys are passed as written.
struct FeatureRule {
  std::string ns, name;
  std::vector<std::string> aliases = {};
  bool free_form = true;
  std::vector<KeyRule> keys = {};
  // Allowed `stats`: regular expressions that match whole names. Empty: no key `stats`.
  std::vector<std::string> statistics = {};
  bool any_case = false;  // names of statistics are compared without case
  // The keys of those statistics that may be written as a mapping, `{name: {key: value}}`, by name.
  std::map<std::string, std::vector<KeyRule>> statistic_keys = {};
  std::vector<std::string> tensors = {};  // allowed tensor names; empty: takes no tensors
  bool any_tensors = false;               // takes tensors of any names, which the program chooses
  bool takes_gemms = false;               // gemms or gemms_struct is required
  bool scheduled = false;                 // freq, start_step, end_step, start_end_list
  // Features that must not act on the same tensor and gemm.
  std::vector<std::string> conflicts = {};
};

enum class Severity { Warning, Error };

struct Problem {
  Severity severity;
  Mark at;
  std::string path;     // "section.transformer_engine.LogTensorStats.stats[1]"
  std::string message;  // "expected ..., got ...; did you mean ...?"
};

// "file:line:column: path: message", without the parts that are unknown.
std::string describe(const Problem& problem, std::string_view origin);

// One feature of one section.
struct FeatureUse {
  std::string ns, feature;  // canonical name, whatever alias was written
  std::string written;      // the name as written
  int section;              // index into Config::sections
  Node body;                // as written, without `enabled`
  Mark mark;
};

struct Section {
  std::string name;
  bool enabled = false;
  Selector selector = {};
  std::vector<FeatureUse> uses = {};  // enabled ones, in file order; none of a disabled section
  Mark mark = {};
};

struct Config {
  std::string origin = {};  // path, or "<dict>"
  std::vector<Section> sections = {};
  uint64_t hash = 0;                       // of the content: ranks compare it
  std::vector<std::string> names() const;  // of all sections, in file order (for the log line)
};

struct Loaded {
  Config config = {};
  std::vector<Problem> problems = {};  // in file order; if one is an error, config must not be used
  bool has_errors() const;
};

// Reads a configuration from YAML text or from a tree. Errors in the text are among the problems.
// `origin` is the file name in messages, `rules` are those of all known features, and `regex`
// checks patterns and names of statistics.
Loaded load_config(std::string_view text, std::string origin, const std::vector<FeatureRule>& rules,
                   const RegexSearch& regex);
Loaded load_config(const Node& root, std::string origin, const std::vector<FeatureRule>& rules,
                   const RegexSearch& regex);

// The rule of a feature, found by its name or an alias; null if there is none.
const FeatureRule* find_rule(const std::vector<FeatureRule>& rules, std::string_view ns,
                             std::string_view feature);

// The configuration of a feature for one tensor and gemm: the outer keys, overridden by those of
// the matching gemms_struct and tensors_struct items. The lists are replaced by the keys `gemm` and
// `tensor`, and a single value of `stats` by a list. Without a gemm (or tensor), the lists of gemms
// (or tensors) are ignored. Returns nothing if the configuration does not cover the tensor and
// gemm, or if the tensor is neither an operand nor the result of the gemm.
std::optional<Node> config_for(const FeatureUse& use, const FeatureRule& rule,
                               std::optional<std::string_view> gemm,
                               std::optional<std::string_view> tensor);

// The schedule of a parsed configuration: freq, start_step, end_step (-1: no end), start_end_list
// (closed intervals; replaces start and end). null and absent keys have their defaults.
Schedule schedule_of(const Node& parsed);

}  // namespace te::inspect
