// The typed configuration: sections that pick layers, and the features that act on them.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "inspect/node.h"
#include "inspect/schedule.h"
#include "inspect/selector.h"

namespace te::inspect {

// What a feature class says about its own configuration. Classes that declare nothing are
// free-form: selectors, gemms / tensors shapes and schedules are checked, other keys travel as
// written.
struct KeyRule {
  std::string name;
  std::string kind;                       // "bool", "int", "number", "string", "choice", "any"
  std::vector<std::string> choices = {};  // of "choice"; compared without case
  bool required = false;
};

struct FeatureRule {
  std::string ns, name;
  std::vector<std::string> aliases = {};
  bool free_form = true;
  std::vector<KeyRule> keys = {};
  // Legal `stats`: regular expressions that match whole names; empty: there is no key `stats`.
  std::vector<std::string> statistics = {};
  std::vector<std::string> tensors = {};  // legal tensor names; empty: takes no tensors
  bool takes_gemms = false;               // gemms or gemms_struct must be there
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

// "file:line:column: path: message", without what there is none of.
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
  std::vector<Problem> problems =
      {};  // in file order; with an error among them, config must not be used
  bool has_errors() const;
};

// text: YAML; mistakes in it are problems, too. origin: file name for messages. rules: of every
// known feature. regex: checks patterns and names of statistics.
Loaded load_config(std::string_view text, std::string origin, const std::vector<FeatureRule>& rules,
                   const RegexSearch& regex);
Loaded load_config(const Node& root, std::string origin, const std::vector<FeatureRule>& rules,
                   const RegexSearch& regex);

// The rule of a feature under its name or an alias; null where there is none.
const FeatureRule* find_rule(const std::vector<FeatureRule>& rules, std::string_view ns,
                             std::string_view feature);

// What a feature's configuration says for one tensor and gemm: the outer keys, overridden by those
// of the matching gemms_struct / tensors_struct items, with `gemm` and `tensor` filled in where the
// configuration lists them, and without the lists. A bare `stats` is a list of one. Either may be
// absent: a call that does not carry it ignores it. Empty where the configuration does not cover
// them, and for a tensor that is no operand (nor result) of the gemm.
std::optional<Node> config_for(const FeatureUse& use, const FeatureRule& rule,
                               std::optional<std::string_view> gemm,
                               std::optional<std::string_view> tensor);

// The schedule of a parsed configuration: freq, start_step, end_step (-1: no end), start_end_list
// (closed intervals; replaces start and end). null and absent keys have their defaults.
Schedule schedule_of(const Node& parsed);

}  // namespace te::inspect
