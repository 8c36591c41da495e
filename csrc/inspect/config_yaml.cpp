#include "inspect/config_yaml.h"

#include <yaml-cpp/eventhandler.h>
#include <yaml-cpp/exceptions.h>
#include <yaml-cpp/mark.h>
#include <yaml-cpp/parser.h>

#include <algorithm>
#include <map>
#include <optional>
#include <set>
#include <sstream>
#include <string>
#include <utility>
#include <vector>

#include "core/error.h"
#include "inspect/config_yaml_errors.h"
#include "inspect/config_yaml_text.h"
#include "inspect/yaml_scalar.h"

namespace te::inspect {
namespace {

constexpr std::string_view kMergeKey = "<<";

// A complete value, with its size after aliases are expanded.
struct Tree {
  Node node = {};
  size_t nodes = 1;
  int depth = 0;  // of collections, this one included
};

// A text that is equal for two keys exactly if they are the same key of a Python dict.
std::string identity(const Node& key) {
  if (key.is_string()) return "s" + key.as_string();
  if (key.is_null()) return "n";
  if (key.is_bool()) return concat("d", key.as_bool() ? 1.0 : 0.0);
  return key.is_int() ? concat("d", key.as_int()) : concat("d", key.as_double());
}

// The pairs that `<<` merges into a mapping, in the order in which a Python dict would have them.
class Merge {
 public:
  bool empty() const { return items_.empty(); }
  Node::Mapping take() { return std::move(items_); }

  void put(Node key, Node value) {
    const auto [place, is_new] = places_.emplace(identity(key), items_.size());
    if (is_new) {
      items_.emplace_back(std::move(key), std::move(value));
    } else {
      items_[place->second].second = std::move(value);
    }
  }

 private:
  Node::Mapping items_;
  std::map<std::string, size_t> places_;
};

// A collection that is being read.
struct Frame {
  Tree tree;
  YAML::anchor_t anchor;
  bool in_brackets = false;
  std::optional<Node> key = {};  // in a mapping: the key whose value comes next
  bool key_is_merge = false;
  Merge merge = {};
  std::set<std::string> keys = {};  // their identities
};

size_t offset_of(const SourceText& source, const YAML::Mark& mark) {
  return std::min(static_cast<size_t>(std::max(mark.pos, 0)), source.text().size());
}

// Builds the tree from the events of yaml-cpp's parser. yaml-cpp accepts some texts that PyYAML
// refuses, and reads others differently. This class looks for such cases in the text and refuses
// them.
class TreeBuilder : public YAML::EventHandler {
 public:
  explicit TreeBuilder(const SourceText& source) : source_(source) {}

  bool started() const { return started_; }
  Node take_root() { return std::move(root_.node); }
  // The ranges of all quoted and block scalars, in which tabs and # have no special meaning.
  const std::vector<std::pair<size_t, size_t>>& opaque() const { return opaque_; }

  void OnDocumentStart(const YAML::Mark& mark) override {
    if (started_) error(mark, "expected the end of the file, got more after the first document");
    started_ = true;
  }
  void OnDocumentEnd() override {}

  void OnNull(const YAML::Mark& mark, YAML::anchor_t anchor) override {
    reject_tag(mark);
    complete({.node = {.mark = at(mark), .value = {}}}, anchor, false);
  }

  void OnScalar(const YAML::Mark& mark, const std::string& tag, YAML::anchor_t anchor,
                const std::string& value) override {
    const size_t begin = reject_tag(mark);
    Tree scalar{.node = {.mark = source_.mark(begin), .value = to_utf8(value)}};
    const bool plain = tag == "?";
    if (plain) {
      reject_colon(scalar.node.mark, value);
      try {
        scalar.node.value = resolve_plain(value);
      } catch (const Error&) {
        throw TextError(scalar.node.mark,
                        "expected an integer of at most 64 bits, got " + brief(scalar.node));
      }
    } else {
      opaque_.emplace_back(begin, end_of_scalar(begin));
    }
    complete(std::move(scalar), anchor, plain && value == kMergeKey);
  }

  void OnAlias(const YAML::Mark& mark, YAML::anchor_t anchor) override {
    const auto found = anchors_.find(anchor);
    if (found == anchors_.end())
      error(mark, "expected an alias of something complete, got one of what it stands in");
    if (counted_ + found->second.nodes > kMaxNodes) too_many(at(mark));
    complete(found->second, YAML::NullAnchor, false);
  }

  void OnSequenceStart(const YAML::Mark& mark, const std::string&, YAML::anchor_t anchor,
                       YAML::EmitterStyle::value style) override {
    open(mark, anchor, style, Node::Sequence());
  }
  void OnSequenceEnd() override { close(); }
  void OnMapStart(const YAML::Mark& mark, const std::string&, YAML::anchor_t anchor,
                  YAML::EmitterStyle::value style) override {
    open(mark, anchor, style, Node::Mapping());
  }
  void OnMapEnd() override { close(); }

 private:
  Mark at(const YAML::Mark& mark) const { return source_.mark(offset_of(source_, mark)); }
  [[noreturn]] void error(const YAML::Mark& mark, const std::string& message) const {
    throw TextError(at(mark), message);
  }
  [[noreturn]] static void too_many(Mark mark) {
    throw TextError(mark,
                    concat("expected at most ", kMaxNodes, " values, aliases expanded, got more"));
  }

  // Returns the offset at which a value begins, after its anchor and the blanks and comments behind
  // that. Throws if there is a tag.
  size_t reject_tag(const YAML::Mark& mark) const {
    const std::string_view text = source_.text();
    size_t i = offset_of(source_, mark);
    if (text.substr(i).starts_with('&')) {
      i = end_of_anchor(source_, i);
      while (i < text.size() &&
             std::string_view(" \t\r\n#").find(text[i]) != std::string_view::npos) {
        i = text[i] == '#' ? std::min(text.find_first_of("\r\n", i), text.size()) : i + 1;
      }
    }
    if (text.substr(i).starts_with('!')) {
      throw TextError(source_.mark(i), "expected a value without a tag, got an explicit tag");
    }
    return i;
  }

  // Returns the end of a scalar: for a quoted one, the offset after the closing quote; for a block,
  // the first line that is indented less than the first line of the block.
  size_t end_of_scalar(size_t begin) const {
    const std::string_view text = source_.text();
    if (begin == text.size()) return begin;
    const char style = text[begin];
    size_t i = begin + 1;
    if (style == '\'' || style == '"') {
      for (; i < text.size(); ++i) {
        if (style == '"' && text[i] == '\\') {
          ++i;
        } else if (text[i] == style) {
          if (style == '\'' && text.substr(i + 1).starts_with('\'')) {
            ++i;
          } else {
            reject_blank_end(begin, i);
            return i + 1;
          }
        }
      }
      throw TextError(source_.mark(begin), "expected a closing quote, got the end of the file");
    }
    if (style != '|' && style != '>') return i;
    const size_t end = text.find_first_of("\t\r\n#", begin);
    if (end != text.npos && text[end] == '\t')
      throw TextError(source_.mark(end), "expected spaces, got a tab");
    const std::string_view header = text.substr(begin, text.find_first_of(" \r\n#", begin) - begin);
    if (style == '>' && header.find('+') != header.npos)  // yaml-cpp keeps one line feed too many
      throw TextError(source_.mark(begin), concat("expected > or >-, got ", header));
    return end_of_block(i);
  }

  // Refuses blank lines before the closing quote, because yaml-cpp keeps only one of them, or none
  // if there is no text.
  void reject_blank_end(size_t begin, size_t quote) const {
    const std::string_view inner = source_.text().substr(begin + 1, quote - begin - 1);
    const size_t text = inner.find_last_not_of(" \t\r\n") + 1;  // npos + 1 is 0
    if (std::ranges::count(inner.substr(text), '\n') > (text == 0 ? 1 : 2)) {
      throw TextError(source_.mark(begin),
                      "expected a closing quote below its text, got blank lines between");
    }
  }

  size_t end_of_block(size_t i) const {
    const std::string_view text = source_.text();
    std::optional<size_t> indent;
    i = std::min(text.find('\n', i), text.size());
    while (i < text.size()) {
      const size_t line = i + 1;
      const size_t first = std::min(text.find_first_not_of(' ', line), text.size());
      const bool empty = first == text.size() || text[first] == '\n' || text[first] == '\r';
      if (!empty) {
        if (!indent) indent = first - line;
        if (first - line < *indent || (*indent == 0 && frames_.size() > 0)) return line;
      }
      if (first == text.size() && indent && first - line > *indent) {
        throw TextError(source_.mark(line),
                        "expected a line feed at the end of the file, got spaces of a block");
      }
      i = std::min(text.find('\n', line), text.size());
    }
    return text.size();
  }

  // Refuses an unquoted text in brackets that begins with a colon, which PyYAML takes for the colon
  // after a key.
  void reject_colon(Mark mark, const std::string& value) const {
    if (value.starts_with(':') && !frames_.empty() && frames_.back().in_brackets)
      throw TextError(mark, "expected quotes around a text that begins with a colon, got none");
  }

  void open(const YAML::Mark& mark, YAML::anchor_t anchor, YAML::EmitterStyle::value style,
            decltype(Node::value) empty) {
    const size_t begin = reject_tag(mark);
    if (frames_.size() >= kMaxDepth)
      error(mark, concat("expected at most ", kMaxDepth, " levels, got more"));
    if (awaits_key()) error(mark, "expected a plain value as key, got a list or a mapping");
    count(1, source_.mark(begin));
    Node node{.mark = source_.mark(begin), .value = std::move(empty)};
    frames_.push_back({.tree = {.node = std::move(node), .nodes = 1, .depth = 1},
                       .anchor = anchor,
                       .in_brackets = style == YAML::EmitterStyle::Flow});
  }

  void close() {
    Frame frame = std::move(frames_.back());
    frames_.pop_back();
    if (!frame.merge.empty()) apply_merge(frame);
    counted_ -= frame.tree.nodes;  // complete() counts it again
    complete(std::move(frame.tree), frame.anchor, false);
  }

  // The mapping's own keys replace the values of equal merged keys. Merged keys stay in front.
  static void apply_merge(Frame& frame) {
    Node::Mapping own = std::move(frame.tree.node.as_mapping());
    for (auto& [key, value] : own) frame.merge.put(std::move(key), std::move(value));
    frame.tree.node.value = frame.merge.take();
  }

  bool awaits_key() const {
    return !frames_.empty() && frames_.back().tree.node.is_mapping() && !frames_.back().key;
  }

  void count(size_t nodes, Mark mark) {
    counted_ += nodes;
    if (counted_ > kMaxNodes) too_many(mark);
  }

  void complete(Tree tree, YAML::anchor_t anchor, bool is_merge) {
    count(tree.nodes, tree.node.mark);
    if (static_cast<int>(frames_.size()) + tree.depth > kMaxDepth) {
      throw TextError(tree.node.mark, concat("expected at most ", kMaxDepth,
                                             " levels, aliases expanded, got more"));
    }
    if (anchor != YAML::NullAnchor) anchors_[anchor] = tree;
    if (frames_.empty()) {
      root_ = std::move(tree);
      return;
    }
    Frame& frame = frames_.back();
    frame.tree.nodes += tree.nodes;
    frame.tree.depth = std::max(frame.tree.depth, tree.depth + 1);
    if (frame.tree.node.is_sequence()) {
      frame.tree.node.as_sequence().push_back(std::move(tree.node));
    } else if (!frame.key) {
      take_key(frame, std::move(tree.node), is_merge);
    } else {
      take_value(frame, std::move(tree.node));
    }
  }

  static void take_key(Frame& frame, Node key, bool is_merge) {
    if (!key.is_scalar())
      throw TextError(key.mark, "expected a plain value as key, got a list or a mapping");
    if (key.is_null()) throw TextError(key.mark, "expected a key, got nothing");
    if (!frame.keys.insert(is_merge ? std::string("m") : identity(key)).second) {
      throw TextError(key.mark, "expected each key once, got " + brief(key) + " again");
    }
    frame.key = std::move(key);
    frame.key_is_merge = is_merge;
  }

  static void take_value(Frame& frame, Node value) {
    Node key = std::move(*frame.key);
    frame.key.reset();
    if (!frame.key_is_merge) {
      frame.tree.node.as_mapping().emplace_back(std::move(key), std::move(value));
      return;
    }
    Node::Sequence sources;
    if (value.is_sequence()) {
      sources = std::move(value.as_sequence());
    } else {
      sources.push_back(std::move(value));
    }
    // As in PyYAML, the keys of the last source come first, but values of earlier sources win.
    for (size_t i = sources.size(); i-- > 0;) {
      if (!sources[i].is_mapping()) {
        throw TextError(
            sources[i].mark,
            "expected a mapping, or a list of mappings, after <<, got " + brief(sources[i]));
      }
      for (auto& [name, node] : sources[i].as_mapping())
        frame.merge.put(std::move(name), std::move(node));
    }
  }

  const SourceText& source_;
  std::vector<Frame> frames_;
  std::map<YAML::anchor_t, Tree> anchors_;
  std::vector<std::pair<size_t, size_t>> opaque_;
  Tree root_;
  size_t counted_ = 0;
  bool started_ = false;
};

// Throws TextError for an error of yaml-cpp. If the line is indented by a tab, yaml-cpp complains
// about something else in that line, so this looks for a tab first.
void explain(const SourceText& source, const YAML::Exception& thrown) {
  const std::string_view text = source.text();
  const size_t offset = offset_of(source, thrown.mark);
  const size_t line = offset == 0 ? 0 : text.find_last_of("\r\n", offset - 1) + 1;
  const size_t first = text.find_first_not_of(' ', line);
  if (first != text.npos && text[first] == '\t')
    throw TextError(source.mark(first), "expected spaces, got a tab");
  const std::string why = explain_yaml_error(source, offset, to_utf8(thrown.msg));
  throw TextError(source.mark(offset), "expected YAML, got " + why);
}

}  // namespace

Node parse_yaml(std::string_view text) {
  constexpr std::string_view kByteOrderMark = "\xef\xbb\xbf";
  if (text.starts_with(kByteOrderMark)) text.remove_prefix(kByteOrderMark.size());
  const SourceText source(text);
  // With a last line of spaces, yaml-cpp would add a space to the end of a folded block, so that
  // line is left out.
  const size_t last = text.find_last_of('\n') + 1;  // npos + 1 is 0
  const bool blank = text.find_first_not_of(' ', last) == text.npos;
  std::string read(text.substr(0, blank ? last : text.size()));
  // yaml-cpp loses bytes of streams shorter than four bytes when it detects the encoding.
  if (read.size() < 4) read += "\n\n\n\n";
  std::istringstream stream(read);
  TreeBuilder builder(source);
  try {
    YAML::Parser parser(stream);
    while (parser.HandleNextDocument(builder)) {
    }
  } catch (const YAML::Exception& thrown) {
    explain(source, thrown);
  }
  reject_tabs_and_directives(source, builder.opaque());
  return builder.take_root();
}

}  // namespace te::inspect
