#include "inspect/config_feature.h"

#include <algorithm>
#include <set>

#include "core/error.h"
#include "inspect/config_schedule.h"
#include "inspect/gemm_names.h"
#include "inspect/suggest.h"

namespace te::inspect {
namespace {

using Strings = std::vector<std::string>;
using Name = std::optional<std::string_view>;

const Strings kGemmNames(kGemms.begin(), kGemms.end());
const Strings kTensorNames(kTensors.begin(), kTensors.end());
constexpr std::string_view kOfLayers = "transformer_engine";  // its features are called by layers

enum class Level { Feature, Gemm, Tensor };

bool has(const Strings& names, std::string_view name) {
  return std::ranges::find(names, name) != names.end();
}

bool has_any(const Node& node, std::initializer_list<std::string_view> keys) {
  return std::ranges::any_of(keys, [&](std::string_view key) { return node.find(key) != nullptr; });
}

bool accepts_tensors(const FeatureRule& rule) { return rule.any_tensors || !rule.tensors.empty(); }

bool accepts_gemms(const FeatureRule& rule) { return rule.takes_gemms || accepts_tensors(rule); }

// Checks a body as it is written: the keys and values of each level.
class BodyCheck {
 public:
  BodyCheck(const FeatureRule& rule, const std::vector<FeatureRule>& rules,
            const RegexSearch& regex)
      : rule_(rule), rules_(rules), regex_(regex) {}

  void check_level(const Node& level, Level kind, const ConfigPath& path) const {
    if (!level.is_mapping()) {
      path.mistake(level.mark, "expected a mapping, got " + brief(level));
      return;
    }
    for (const auto& [key, node] : level.as_mapping()) {
      const std::string name = key_text(key);
      const ConfigPath here = path.at(name);
      if (!rule_.free_form && !has(allowed(kind), name)) {
        here.mistake(key.mark, expected_one_of(allowed(kind), name));
      } else {
        check_key(name, node, kind, here);
      }
    }
    const std::string_view own = kind == Level::Gemm ? "gemm" : "tensor";
    if (kind != Level::Feature && !level.find(own)) {
      path.mistake(level.mark, concat("expected the key ", own, ", got ", brief(level)));
    }
  }

 private:
  Strings allowed(Level kind) const {
    Strings keys;
    const auto add = [&](bool condition, std::initializer_list<const char*> names) {
      if (condition) keys.insert(keys.end(), names.begin(), names.end());
    };
    add(kind == Level::Gemm, {"gemm"});
    add(kind == Level::Tensor, {"tensor"});
    add(kind == Level::Feature && accepts_gemms(rule_), {"gemms", "gemms_struct"});
    add(kind != Level::Tensor && accepts_tensors(rule_), {"tensors", "tensors_struct"});
    add(!rule_.statistics.empty(), {"stats"});
    add(rule_.scheduled, {"freq", "start_step", "end_step", "start_end_list"});
    for (const KeyRule& key : rule_.keys) keys.push_back(key.name);
    return keys;
  }

  void check_key(const std::string& name, const Node& node, Level kind,
                 const ConfigPath& path) const {
    const auto key = std::ranges::find(rule_.keys, name, &KeyRule::name);
    if (key != rule_.keys.end()) return check_value(*key, node, path);
    if (is_schedule_key(name)) return check_schedule_key(name, node, path);
    if (name == "stats" && !rule_.statistics.empty()) return check_statistics(node, path);
    if (kind == Level::Gemm && name == "gemm") return check_name(node, kGemmNames, path);
    if (kind == Level::Tensor && name == "tensor") return check_name(node, tensors(), path);
    if (kind == Level::Feature && name == "gemms") return check_names(node, kGemmNames, path);
    if (kind != Level::Tensor && name == "tensors") return check_names(node, tensors(), path);
    if (kind == Level::Feature && name == "gemms_struct") check_items(node, Level::Gemm, path);
    if (kind != Level::Tensor && name == "tensors_struct") check_items(node, Level::Tensor, path);
  }

  const Strings& tensors() const { return rule_.tensors.empty() ? kTensorNames : rule_.tensors; }

  // A free-form feature, and one that takes any tensors, may be called by a program with other
  // names than those that layers use, so an unknown name is only a warning. Outside of the
  // namespace of layers, it is one only if the name looks like a misspelt one.
  void check_name(const Node& node, const Strings& legal, const ConfigPath& path) const {
    if (!node.is_string()) {
      path.mistake(node.mark, "expected a name, got " + brief(node));
    } else if (!has(legal, node.as_string())) {
      const bool meant = rule_.ns == kOfLayers || nearest(node.as_string(), legal).has_value();
      const bool own = rule_.free_form || rule_.any_tensors;
      if (own && !meant) return;
      (own ? path.as_warnings() : path)
          .mistake(node.mark, expected_one_of(legal, node.as_string()));
    }
  }

  // Checks a list of names. An empty list is legal, but probably a mistake.
  void check_names(const Node& node, const Strings& legal, const ConfigPath& path) const {
    const std::vector<const Node*> items = as_list(node);
    if (items.empty()) {
      (node.is_null() && !rule_.free_form ? path : path.as_warnings())
          .mistake(node.mark, "expected at least one name, got " + brief(node));
    }
    size_t index = 0;
    for (const Node* item : items) {
      check_name(*item, legal, node.is_sequence() ? path.at(index++) : path);
    }
  }

  void check_items(const Node& list, Level kind, const ConfigPath& path) const {
    if (!list.is_sequence()) {
      path.mistake(list.mark, "expected a list of mappings, got " + brief(list));
      return;
    }
    const std::string_view field = kind == Level::Gemm ? "gemm" : "tensor";
    std::set<std::string> seen;
    for (size_t i = 0; i < list.as_sequence().size(); ++i) {
      const Node& item = list.as_sequence()[i];
      check_level(item, kind, path.at(i));
      const Node* name = item.find(field);
      if (name && name->is_string() && !seen.insert(name->as_string()).second) {
        path.at(i).mistake(name->mark,
                           concat("expected each ", field, " once, got ", brief(*name), " again"));
      }
    }
  }

  void check_value(const KeyRule& key, const Node& node, const ConfigPath& path) const {
    if (node.is_null() && !key.required) return;
    const bool fits = key.kind == "bool"     ? node.is_bool()
                      : key.kind == "int"    ? node.is_int()
                      : key.kind == "number" ? node.is_int() || node.is_double()
                      : key.kind == "string" ? node.is_string()
                                             : true;
    const bool too_small = node.is_int() && key.at_least && node.as_int() < *key.at_least;
    const bool too_large = node.is_int() && key.at_most && node.as_int() > *key.at_most;
    if (!fits || too_small || too_large) {
      path.mistake(node.mark, concat("expected ", described(key), ", got ", brief(node)));
    } else if (key.kind == "choice") {
      const std::string text = key_text(node);
      const bool legal = node.is_string() && std::ranges::any_of(key.choices, [&](const auto& c) {
                           return equal_without_case(c, text);
                         });
      if (!legal) path.mistake(node.mark, expected_one_of(key.choices, text));
    }
  }

  // "an int of at least 1 and at most 2"
  static std::string described(const KeyRule& key) {
    std::string text = concat(key.kind == "int" ? "an " : "a ", key.kind);
    if (key.at_least) text += concat(" of at least ", *key.at_least);
    if (key.at_most) text += concat(key.at_least ? " and" : " of", " at most ", *key.at_most);
    return text;
  }

  void check_statistics(const Node& node, const ConfigPath& path) const {
    const std::vector<const Node*> items = as_list(node);
    if (items.empty()) path.mistake(node.mark, "expected at least one statistic, got none");
    for (size_t i = 0; i < items.size(); ++i) {
      check_statistic(*items[i], node.is_sequence() ? path.at(i) : path);
    }
  }

  // Checks one statistic: a name, or a mapping from the name to keys, `{name: {key: value}}`.
  void check_statistic(const Node& item, const ConfigPath& path) const {
    const bool mapping = item.is_mapping() && item.as_mapping().size() == 1;
    const Node& name = mapping ? item.as_mapping()[0].first : item;
    if (!name.is_string()) {
      path.mistake(name.mark, "expected the name of a statistic, got " + brief(name));
    } else if (!has_statistic(rule_, name.as_string())) {
      path.mistake(name.mark, not_a_statistic(name.as_string()));
    } else if (mapping) {
      check_statistic_keys(item, path);
    }
  }

  void check_statistic_keys(const Node& item, const ConfigPath& path) const {
    const auto& [key, body] = item.as_mapping()[0];
    const auto rule = rule_.statistic_keys.find(key.as_string());
    if (rule == rule_.statistic_keys.end()) {
      const std::string alone = concat("expected ", key.as_string(), " without keys, got ");
      return path.mistake(key.mark, alone + brief(item));
    }
    const ConfigPath inside = path.at(key.as_string());
    if (body.is_null()) return;
    if (!body.is_mapping()) return expect_keys(body, key.mark, inside);
    check_keys(body, rule->second, inside);
  }

  void check_keys(const Node& body, const std::vector<KeyRule>& rules,
                  const ConfigPath& path) const {
    for (const auto& [key, node] : body.as_mapping()) {
      const std::string name = key_text(key);
      const auto rule = std::ranges::find(rules, name, &KeyRule::name);
      if (rule != rules.end()) {
        check_value(*rule, node, path.at(name));
      } else {
        Strings known;
        for (const KeyRule& one : rules) known.push_back(one.name);
        path.at(name).mistake(key.mark, expected_one_of(known, name));
      }
    }
  }

  bool has_statistic(const FeatureRule& rule, const std::string& name) const {
    return std::ranges::any_of(rule.statistics, [&](const std::string& pattern) {
      return pattern == name || (rule.any_case && equal_without_case(pattern, name)) ||
             regex_("^(?:" + pattern + ")$", name);
    });
  }

  std::string not_a_statistic(const std::string& name) const {
    for (const FeatureRule& other : rules_) {
      if (other.ns == rule_.ns && has_statistic(other, name))
        return concat("expected a statistic of ", rule_.name, ", got '", name,
                      "', which belongs under ", other.name);
    }
    return expected_one_of(rule_.statistics, name);
  }

  const FeatureRule& rule_;
  const std::vector<FeatureRule>& rules_;
  const RegexSearch& regex_;
};

// Adds the names of tensors in a body that are not those of layers: a program may use any names.
void add_own_names(const Node& body, std::vector<Name>& names) {
  const auto add = [&](const Node* name) {
    if (!name || !name->is_string()) return;
    const Name own = name->as_string();
    if (std::ranges::find(names, own) == names.end()) names.push_back(own);
  };
  if (const Node* plain = body.find("tensors")) {
    for (const Node* name : as_list(*plain)) add(name);
  }
  if (const Node* structs = body.find("tensors_struct")) {
    for (const Node* item : as_list(*structs)) add(item->find("tensor"));
  }
}

}  // namespace

std::vector<std::pair<Name, Name>> pairs_of(const Node& body) {
  std::vector<Name> gemms = {std::nullopt}, tensors = {std::nullopt};
  bool structured = false;
  if (const Node* items = body.find("gemms_struct")) {
    for (const Node* item : as_list(*items))
      structured |= has_any(*item, {"tensors", "tensors_struct"});
  }
  if (has_any(body, {"gemms", "gemms_struct"})) gemms.assign(kGemms.begin(), kGemms.end());
  if (structured || has_any(body, {"tensors", "tensors_struct"})) {
    tensors.assign(kTensors.begin(), kTensors.end());
    add_own_names(body, tensors);
  }
  std::vector<std::pair<Name, Name>> pairs;
  for (const Name& gemm : gemms) {
    for (const Name& tensor : tensors) pairs.emplace_back(gemm, tensor);
  }
  return pairs;
}

namespace {

// Checks of the configuration for each tensor and gemm, which is known only after outer and inner
// keys have been merged.
class WholeCheck {
 public:
  WholeCheck(const FeatureUse& use, const FeatureRule& rule, const ConfigPath& path)
      : use_(use), rule_(rule), path_(path) {}

  void check() {
    if (rule_.takes_gemms && !has_any(use_.body, {"gemms", "gemms_struct"})) {
      path_.mistake(use_.mark, "expected the key gemms or gemms_struct, got neither");
    }
    FeatureRule raw = rule_;  // with this, config_for() also returns pairs that are no operands
    raw.takes_gemms = false;
    for (const auto& [gemm, tensor] : pairs_of(use_.body)) {
      const bool unknown = !rule_.tensors.empty() && tensor && !has(rule_.tensors, *tensor);
      if (unknown) continue;  // reported by BodyCheck
      const std::optional<Node> config = config_for(use_, raw, gemm, tensor);
      if (!config) continue;
      if (accepts_tensors(rule_) && !config->find("tensor")) {
        missing("tensors or tensors_struct", *config, gemm);
      } else if (rule_.takes_gemms && gemm && tensor && !takes_or_gives(*gemm, *tensor)) {
        strangers_.emplace_back(*gemm, *tensor);
        continue;
      }
      if (gemm) used_.insert(*gemm);
      if (tensor) used_.insert(*tensor);
      check_one(*config);
    }
    tell_strangers();
  }

 private:
  // Warns about tensors that their GEMMs neither take nor give. The lists `gemms` and `tensors`
  // mean all pairs, so a pair from them is a mistake only if its gemm or tensor is in no valid
  // pair.
  void tell_strangers() const {
    const bool lists = !use_.body.find("gemms_struct");
    std::string text;
    for (const auto& [gemm, tensor] : strangers_) {
      if (lists && used_.contains(gemm) && used_.contains(tensor)) continue;
      text += concat(text.empty() ? "" : ", ", tensor, " in ", gemm);
    }
    if (text.empty()) return;
    path_.warn(use_.mark, "expected operands of the GEMMs, got " + text +
                              ", which those GEMMs do not take: those stay as they are");
  }

  void check_one(const Node& config) {
    if (!rule_.statistics.empty() && !config.find("stats")) missing("stats", config);
    for (const KeyRule& key : rule_.keys) {
      if (key.required && !config.find(key.name)) missing(key.name, config);
    }
    const Node *start = config.find("start_step"), *end = config.find("end_step");
    const bool both = start && end && start->is_int() && end->is_int();
    const Node* list = config.find("start_end_list");  // with this key, both are ignored
    const bool listed = list && list->is_sequence() && !list->as_sequence().empty();
    const bool scheduled = (rule_.scheduled || rule_.free_form) && !listed;
    if (scheduled && both && end->as_int() >= 0 && end->as_int() < start->as_int()) {
      once(path_.at("end_step"), end->mark,
           concat("expected at least start_step, ", start->as_int(), ", got ", end->as_int()));
    }
  }

  void missing(std::string_view key, const Node& config, const Name& gemm = std::nullopt) {
    once(path_, config.mark.line > 0 ? config.mark : use_.mark,
         concat("expected the key ", key, gemm ? concat(" for gemm ", *gemm) : "", ", got none"));
  }

  void once(const ConfigPath& path, Mark mark, const std::string& message) {
    if (said_.insert(path.path() + message).second) path.mistake(mark, message);
  }

  const FeatureUse& use_;
  const FeatureRule& rule_;
  const ConfigPath& path_;
  std::vector<std::pair<std::string_view, std::string_view>> strangers_;  // invalid (gemm, tensor)
  std::set<std::string_view> used_;  // gemms and tensors that are in a valid pair
  std::set<std::string> said_;
};

// The first tensor and gemm that both features act on.
std::optional<std::string> common(const FeatureUse& a, const FeatureRule& rule_a,
                                  const FeatureUse& b, const FeatureRule& rule_b) {
  for (const std::string_view gemm : kGemms) {
    for (const std::string_view tensor : kTensors) {
      if (takes_or_gives(gemm, tensor) && config_for(a, rule_a, gemm, tensor) &&
          config_for(b, rule_b, gemm, tensor)) {
        return concat(tensor, " in ", gemm);
      }
    }
  }
  return std::nullopt;
}

}  // namespace

void check_feature(const FeatureUse& use, const FeatureRule& rule,
                   const std::vector<FeatureRule>& rules, const ConfigPath& path,
                   const RegexSearch& regex) {
  BodyCheck(rule, rules, regex).check_level(use.body, Level::Feature, path);
  WholeCheck(use, rule, path).check();
}

void check_conflicts(const std::vector<FeatureUse>& uses,
                     const std::vector<const FeatureRule*>& rules, const ConfigPath& section) {
  for (size_t i = 0; i < uses.size(); ++i) {
    for (size_t j = 0; j < i; ++j) {
      const bool same = rules[i] == rules[j];
      const bool conflict =
          same || (rules[i]->ns == rules[j]->ns && (has(rules[i]->conflicts, rules[j]->name) ||
                                                    has(rules[j]->conflicts, rules[i]->name)));
      if (!conflict) continue;
      if (const auto where = common(uses[j], *rules[j], uses[i], *rules[i])) {
        section.at(uses[i].ns)
            .at(uses[i].written)
            .mistake(uses[i].mark, concat("expected one of ", uses[j].written, " and ",
                                          uses[i].written, " on ", *where, ", got both"));
      }
    }
  }
}

}  // namespace te::inspect
