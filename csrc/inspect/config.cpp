#include "inspect/config.h"

#include <algorithm>
#include <set>
#include <utility>

#include "core/error.h"
#include "inspect/config_feature.h"
#include "inspect/config_layers.h"
#include "inspect/config_yaml.h"
#include "inspect/suggest.h"

namespace te::inspect {
namespace {

constexpr std::string_view kBase = "base";

// Walks through sections, namespaces and features. It goes on after a mistake, so that all problems
// are reported. Mistakes in sections and features that are not enabled are warnings.
class Loader {
 public:
  Loader(Loaded& loaded, const std::vector<FeatureRule>& rules, const RegexSearch& regex)
      : loaded_(loaded), rules_(rules), regex_(regex) {}

  void load(const Node& root) {
    const ConfigPath top(loaded_.problems, Severity::Error);
    if (root.is_null()) return top.warn(root.mark, "expected sections, got an empty file");
    if (!root.is_mapping()) {
      top.mistake(root.mark, "expected sections, each under its name, got " + brief(root));
      return;
    }
    bool empty_above =
        false;  // the section above is empty: keys that follow were meant to be in it
    for (const auto& [key, body] : root.as_mapping()) {
      const std::string name = key_text(key);
      const bool of_a_section = name == "enabled" || name == "layers" || is_namespace(name);
      if (empty_above && of_a_section) continue;
      empty_above = body.is_null();
      load_section(key, body, top.at(name));
    }
  }

 private:
  void load_section(const Node& key, const Node& body, const ConfigPath& strict) {
    Section section{.name = key_text(key), .mark = key.mark};
    const std::optional<bool> enabled = read_enabled(body, key.mark, strict);
    section.enabled = enabled.value_or(false);
    loaded_.config.sections.push_back(section);
    if (!body.is_mapping()) return;
    const ConfigPath path = enabled == false ? strict.as_warnings() : strict;
    Section& stored = loaded_.config.sections.back();
    const Node* layers = body.find("layers");
    if (layers && !layers->is_null()) {
      stored.selector = read_selector(*layers, path.at("layers"), regex_);
    } else if (!layers) {
      path.mistake(key.mark, "expected the key layers, got none");
    }
    load_features(body, path);
    if (found_ == 0) path.warn(key.mark, "expected at least one feature, got none");
    check_conflicts(stored.uses, rules_of_uses_, path);
    if (!stored.enabled) stored.uses.clear();
  }

  // The value of the key `enabled`; nothing if it is missing or wrong, which is reported.
  std::optional<bool> read_enabled(const Node& body, Mark mark, const ConfigPath& path) const {
    if (!body.is_mapping()) {
      expect_keys(body, mark, path);
      return std::nullopt;
    }
    const Node* enabled = body.find("enabled");
    if (!enabled) {
      path.mistake(mark, "expected the key enabled, got none");
    } else if (!enabled->is_bool()) {
      path.at("enabled").mistake(enabled->mark, "expected True or False, got " + brief(*enabled));
    } else {
      return enabled->as_bool();
    }
    return std::nullopt;
  }

  void load_features(const Node& body, const ConfigPath& path) {
    rules_of_uses_.clear();
    found_ = 0;
    bool empty_above = false;
    for (const auto& [key, node] : body.as_mapping()) {
      const std::string name = key_text(key);
      empty_above = empty_above || (node.is_null() && name != "enabled");
      if (name == "layers" && node.is_null()) expect_keys(node, key.mark, path.at(name));
      if (name == "enabled" || name == "layers") continue;
      ++found_;
      if (is_namespace(name)) {
        load_namespace(key, node, path.at(name));
      } else if (find_rule(rules_, kBase, name)) {
        warn_of_namesake(key.mark, name, path.at(name));
        load_feature(kBase, key, node, path.at(name));
      } else if (!empty_above) {
        path.at(name).mistake(key.mark, unknown_key(name));
      }
    }
  }

  bool is_namespace(std::string_view name) const {
    return std::ranges::any_of(rules_, [&](const FeatureRule& rule) { return rule.ns == name; });
  }

  void load_namespace(const Node& namespace_key, const Node& body, const ConfigPath& path) {
    if (!body.is_mapping()) return expect_keys(body, namespace_key.mark, path);
    const std::string ns = key_text(namespace_key);
    bool empty_above = false;
    for (const auto& [key, node] : body.as_mapping()) {
      const std::string name = key_text(key);
      if (find_rule(rules_, ns, name)) {
        empty_above = empty_above || node.is_null();
        load_feature(ns, key, node, path.at(name));
      } else if (!empty_above) {
        path.at(name).mistake(key.mark, unknown_feature(ns, name));
      }
    }
  }

  void load_feature(std::string_view ns, const Node& key, const Node& body,
                    const ConfigPath& strict) {
    const FeatureRule& rule = *find_rule(rules_, ns, key_text(key));
    const std::optional<bool> enabled = read_enabled(body, key.mark, strict);
    if (!body.is_mapping()) return;
    FeatureUse use{.ns = rule.ns,
                   .feature = rule.name,
                   .written = key_text(key),
                   .section = static_cast<int>(loaded_.config.sections.size()) - 1,
                   .body = body,
                   .mark = key.mark};
    use.body.erase("enabled");
    check_feature(use, rule, rules_, enabled == false ? strict.as_warnings() : strict, regex_);
    if (enabled != true) return;
    loaded_.config.sections.back().uses.push_back(std::move(use));
    rules_of_uses_.push_back(&rule);
  }

  // Features whose names begin with an underscore are for tests and not listed. Aliases are older
  // names: they are suggested, but not listed.
  std::string unknown_feature(std::string_view ns, std::string_view name) const {
    std::vector<std::string> names, older;
    for (const FeatureRule& rule : rules_) {
      if (rule.ns != ns || rule.name.starts_with('_')) continue;
      names.push_back(rule.name);
      older.insert(older.end(), rule.aliases.begin(), rule.aliases.end());
    }
    return "unknown feature: " + expected_one_of(names, name, older);
  }

  // The first namespace other than base with a feature of this name; empty if there is none.
  std::string namespace_of(std::string_view name) const {
    std::string found;
    for (const FeatureRule& rule : rules_) {
      const bool first = found.empty() || rule.ns < found;
      if (rule.ns != kBase && first && find_rule(rules_, rule.ns, name)) found = rule.ns;
    }
    return found;
  }

  void warn_of_namesake(Mark mark, const std::string& name, const ConfigPath& path) const {
    const std::string ns = namespace_of(name);
    if (ns.empty()) return;
    path.warn(mark, concat("expected a namespace around a feature that two namespaces have, got "
                           "none: acts only where the program calls it; write '",
                           ns, ": {", name, ": ...}' for GEMMs, or 'base: {", name, ": ...}'"));
  }

  // The message about a key of a section that is neither a namespace nor a feature of base.
  std::string unknown_key(const std::string& name) const {
    std::vector<std::string> known = {"enabled", "layers"};
    std::set<std::string> namespaces;
    for (const FeatureRule& rule : rules_) {
      if (rule.ns != kBase) namespaces.insert(rule.ns);  // features of base need no namespace
    }
    known.insert(known.end(), namespaces.begin(), namespaces.end());
    if (const std::string ns = namespace_of(name); !ns.empty()) {
      return concat("expected a namespace around the feature ", name, ", got none; did you mean '",
                    ns, ": {", name, ": ...}'?");
    }
    return "unknown namespace or feature: " + expected_one_of(known, name);
  }

  Loaded& loaded_;
  const std::vector<FeatureRule>& rules_;
  const RegexSearch& regex_;
  std::vector<const FeatureRule*> rules_of_uses_;  // of the section that is being read
  int found_ = 0;                                  // namespaces and features in it
};

}  // namespace

std::string describe(const Problem& problem, std::string_view origin) {
  std::string text(origin);
  if (problem.at.line > 0) text += concat(":", problem.at.line, ":", problem.at.column);
  if (!text.empty()) text += ": ";
  if (!problem.path.empty()) text += problem.path + ": ";
  return text + problem.message;
}

std::vector<std::string> Config::names() const {
  std::vector<std::string> names;
  for (const Section& section : sections) names.push_back(section.name);
  return names;
}

bool Loaded::has_errors() const {
  return std::ranges::find(problems, Severity::Error, &Problem::severity) != problems.end();
}

const FeatureRule* find_rule(const std::vector<FeatureRule>& rules, std::string_view ns,
                             std::string_view feature) {
  const auto found = std::ranges::find_if(rules, [&](const FeatureRule& rule) {
    return rule.ns == ns &&
           (rule.name == feature || std::ranges::find(rule.aliases, feature) != rule.aliases.end());
  });
  return found == rules.end() ? nullptr : &*found;
}

Loaded load_config(const Node& root, std::string origin, const std::vector<FeatureRule>& rules,
                   const RegexSearch& regex) {
  Loaded loaded;
  loaded.config.origin = std::move(origin);
  loaded.config.hash = content_hash(root);
  Loader(loaded, rules, regex).load(root);
  std::ranges::stable_sort(loaded.problems, {}, [](const Problem& problem) {
    return std::pair(problem.at.line, problem.at.column);
  });
  return loaded;
}

Loaded load_config(std::string_view text, std::string origin, const std::vector<FeatureRule>& rules,
                   const RegexSearch& regex) {
  try {
    const Node root = parse_yaml(text);  // if it throws, `origin` has not been moved from
    return load_config(root, std::move(origin), rules, regex);
  } catch (const TextError& error) {
    Loaded loaded;
    loaded.config.origin = std::move(origin);
    loaded.problems.push_back({Severity::Error, error.mark, "", error.what()});
    return loaded;
  }
}

}  // namespace te::inspect
