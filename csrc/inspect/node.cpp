#include "inspect/node.h"

#include <bit>
#include <charconv>
#include <cmath>

namespace te::inspect {
namespace {

constexpr size_t kBriefLength = 40;

std::string number(double value) {
  if (std::isnan(value)) return ".nan";
  if (std::isinf(value)) return value < 0 ? "-.inf" : ".inf";
  return shortest(value);
}

void write(const Node& node, std::string& text);

template <class Items, class WriteItem>
void write_items(const Items& items, std::string& text, WriteItem write_item) {
  bool first = true;
  for (const auto& item : items) {
    if (text.size() > kBriefLength) return;
    if (!first) text += ", ";
    first = false;
    write_item(item);
  }
}

struct Writer {
  std::string& text;
  void operator()(std::monostate) const { text += "null"; }
  void operator()(bool value) const { text += value ? "true" : "false"; }
  void operator()(int64_t value) const { text += std::to_string(value); }
  void operator()(double value) const { text += number(value); }
  void operator()(const std::string& value) const { text += "'" + value + "'"; }
  void operator()(const Node::Sequence& items) const {
    text += "[";
    write_items(items, text, [&](const Node& item) { write(item, text); });
    text += "]";
  }
  void operator()(const Node::Mapping& items) const {
    text += "{";
    write_items(items, text, [&](const auto& item) {
      write(item.first, text);
      text += ": ";
      write(item.second, text);
    });
    text += "}";
  }
};

void write(const Node& node, std::string& text) { std::visit(Writer{text}, node.value); }

class Hasher {
 public:
  uint64_t state = 0xcbf29ce484222325;

  void add(const Node& node) {
    add_word(node.value.index());
    std::visit(*this, node.value);
  }
  void operator()(std::monostate) {}
  void operator()(bool value) { add_word(value); }
  void operator()(int64_t value) { add_word(static_cast<uint64_t>(value)); }
  void operator()(double value) { add_word(std::bit_cast<uint64_t>(value)); }
  void operator()(const std::string& value) {
    add_word(value.size());
    for (const char c : value) add_byte(static_cast<unsigned char>(c));
  }
  void operator()(const Node::Sequence& items) {
    add_word(items.size());
    for (const Node& item : items) add(item);
  }
  void operator()(const Node::Mapping& items) {
    add_word(items.size());
    for (const auto& [key, item] : items) {
      add(key);
      add(item);
    }
  }

 private:
  void add_byte(uint64_t byte) { state = (state ^ byte) * 0x100000001b3; }
  void add_word(uint64_t word) {
    for (int shift = 0; shift < 64; shift += 8) add_byte(word >> shift & 0xff);
  }
};

bool has_name(const Node& key, std::string_view name) {
  return key.is_string() && key.as_string() == name;
}

}  // namespace

const Node* Node::find(std::string_view key) const {
  if (!is_mapping()) return nullptr;
  for (const auto& [name, node] : as_mapping()) {
    if (has_name(name, key)) return &node;
  }
  return nullptr;
}

void Node::set(std::string_view key, Node node) {
  for (auto& [name, old] : as_mapping()) {
    if (has_name(name, key)) {
      old = std::move(node);
      return;
    }
  }
  Node name{.mark = node.mark, .value = std::string(key)};
  as_mapping().emplace_back(std::move(name), std::move(node));
}

void Node::erase(std::string_view key) {
  std::erase_if(as_mapping(), [&](const auto& item) { return has_name(item.first, key); });
}

std::string shortest(double value) {
  char buffer[32];
  const auto end = std::to_chars(std::begin(buffer), std::end(buffer), value).ptr;
  std::string text(buffer, end);
  return text.find_first_of(".e") == std::string::npos ? text + ".0" : text;
}

std::string brief(const Node& node) {
  std::string text;
  write(node, text);
  if (text.size() <= kBriefLength) return text;
  size_t end = kBriefLength - 3;
  while (end > 0 && (static_cast<unsigned char>(text[end]) & 0xc0) == 0x80)
    --end;  // do not cut a character
  return text.substr(0, end) + "...";
}

uint64_t content_hash(const Node& node) {
  Hasher hasher;
  hasher.add(node);
  return hasher.state;
}

}  // namespace te::inspect
