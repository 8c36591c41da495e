// The configuration of a feature for one tensor and gemm. A body has up to three levels (feature,
// items of gemms_struct, items of tensors_struct), and keys of inner levels override outer ones.
#include <array>

#include "inspect/config.h"
#include "inspect/config_path.h"
#include "inspect/gemm_names.h"

namespace te::inspect {
namespace {

using Name = std::optional<std::string_view>;

constexpr std::array<std::string_view, 4> kLists = {"gemms", "gemms_struct", "tensors",
                                                    "tensors_struct"};

// Copies the keys of one level of a body to `config`, without the lists. They replace earlier keys.
void overlay(Node& config, const Node& level) {
  for (const auto& [key, node] : level.as_mapping()) {
    const bool is_list =
        key.is_string() && std::ranges::find(kLists, key.as_string()) != kLists.end();
    if (!is_list) config.set(key_text(key), node);
  }
}

bool lists(const Node& level, std::string_view key, std::string_view name) {
  const Node* node = level.find(key);
  return node && std::ranges::any_of(as_list(*node), [&](const Node* item) {
           return item->is_string() && item->as_string() == name;
         });
}

// In `<key>: [{<field>: name, ...}, ...]`, the mapping that has the name; null if there is none.
const Node* find_item(const Node& level, std::string_view key, std::string_view field,
                      std::string_view name) {
  const Node* node = level.find(key);
  if (!node) return nullptr;
  for (const Node* item : as_list(*node)) {
    const Node* found = item->find(field);
    if (found && found->is_string() && found->as_string() == name) return item;
  }
  return nullptr;
}

bool has_tensors(const Node& level) {
  return level.find("tensors") || level.find("tensors_struct");
}

void set_name(Node& config, std::string_view key, std::string_view name) {
  config.set(key, {.mark = config.mark, .value = std::string(name)});
}

// Adds the keys of `level` for a tensor to `config`. Returns false if the level lists tensors, but
// not this one.
bool add_tensor(Node& config, const Node& level, const Name& tensor) {
  if (!tensor || !has_tensors(level)) return true;
  if (const Node* item = find_item(level, "tensors_struct", "tensor", *tensor)) {
    overlay(config, *item);
  } else if (!lists(level, "tensors", *tensor)) {
    return false;
  }
  set_name(config, "tensor", *tensor);
  return true;
}

// The same for a call without a gemm, which searches the outer tensors first, then those of each
// gemm.
bool add_tensor_of_any_gemm(Node& config, const Node& body, const Name& tensor) {
  const Node* structs = body.find("gemms_struct");
  const bool outer = has_tensors(body) || !structs;
  if (!tensor || (outer && add_tensor(config, body, tensor))) return true;
  if (!structs) return false;
  bool listed = outer;
  for (const Node* item : as_list(*structs)) {
    if (!item->is_mapping() || !has_tensors(*item)) continue;
    listed = true;
    Node inner = config;
    overlay(inner, *item);
    inner.erase("gemm");
    if (add_tensor(inner, *item, tensor)) {
      config = std::move(inner);
      return true;
    }
  }
  return !listed;
}

std::optional<Node> look_up(const Node& body, const Name& gemm, const Name& tensor) {
  Node config{.mark = body.mark, .value = Node::Mapping()};
  overlay(config, body);
  if (!gemm || !(body.find("gemms") || body.find("gemms_struct"))) {
    if (!add_tensor_of_any_gemm(config, body, tensor)) return std::nullopt;
    return config;
  }
  const Node* item = find_item(body, "gemms_struct", "gemm", *gemm);
  if (item) {
    overlay(config, *item);
  } else if (!lists(body, "gemms", *gemm)) {
    return std::nullopt;
  }
  set_name(config, "gemm", *gemm);
  if (!add_tensor(config, item && has_tensors(*item) ? *item : body, tensor)) return std::nullopt;
  return config;
}

int64_t integer(const Node& parsed, std::string_view key, int64_t fallback) {
  const Node* node = parsed.find(key);
  return node && node->is_int() ? node->as_int() : fallback;
}

}  // namespace

std::optional<Node> config_for(const FeatureUse& use, const FeatureRule& rule, Name gemm,
                               Name tensor) {
  if (rule.takes_gemms && gemm && tensor && !takes_or_gives(*gemm, *tensor)) return std::nullopt;
  std::optional<Node> config = look_up(use.body, gemm, tensor);
  const Node* stats = config && !rule.statistics.empty() ? config->find("stats") : nullptr;
  if (stats && !stats->is_sequence() && !stats->is_null()) {
    config->set("stats", {.mark = stats->mark, .value = Node::Sequence{*stats}});
  }
  return config;
}

Schedule schedule_of(const Node& parsed) {
  const auto end_of = [](int64_t end) { return end == -1 ? Schedule::kNoEnd : end; };
  Schedule schedule{.freq = std::max<int64_t>(integer(parsed, "freq", 1), 1), .intervals = {}};
  const Node* list = parsed.find("start_end_list");
  if (list && list->is_sequence()) {
    for (const Node& pair : list->as_sequence()) {
      if (!pair.is_sequence() || pair.as_sequence().size() != 2) continue;
      const Node &start = pair.as_sequence()[0], &end = pair.as_sequence()[1];
      if (start.is_int() && end.is_int()) {
        schedule.intervals.emplace_back(start.as_int(), end_of(end.as_int()));
      }
    }
  }
  if (schedule.intervals.empty()) {
    schedule.intervals.emplace_back(integer(parsed, "start_step", 0),
                                    end_of(integer(parsed, "end_step", -1)));
  }
  return schedule;
}

}  // namespace te::inspect
