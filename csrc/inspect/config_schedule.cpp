#include "inspect/config_schedule.h"

#include <array>

#include "core/error.h"

namespace te::inspect {
namespace {

void check_integer(const Node& node, const ConfigPath& path, int64_t smallest,
                   std::string_view expected) {
  if (!node.is_int() || node.as_int() < smallest) {
    path.mistake(node.mark, concat("expected ", expected, ", got ", brief(node)));
  }
}

bool is_pair(const Node& node) {
  return node.is_sequence() && node.as_sequence().size() == 2 && node.as_sequence()[0].is_int() &&
         node.as_sequence()[1].is_int();
}

// Checks start_end_list: closed intervals in ascending order that do not overlap. The last one may
// have the end -1, which means no end.
void check_intervals(const Node& list, const ConfigPath& path) {
  if (!list.is_sequence()) {
    path.mistake(list.mark, "expected a list of [start, end] pairs, got " + brief(list));
    return;
  }
  int64_t previous = -1;
  size_t index = 0;
  for (const Node& pair : list.as_sequence()) {
    const ConfigPath here = path.at(index++);
    if (!is_pair(pair)) {
      here.mistake(pair.mark, "expected a pair [start, end] of integers, got " + brief(pair));
      continue;
    }
    const int64_t start = pair.as_sequence()[0].as_int();
    const int64_t written_end = pair.as_sequence()[1].as_int();
    const bool endless = written_end == -1 && index == list.as_sequence().size();
    const int64_t end = endless ? Schedule::kNoEnd : written_end;
    if (start < 0 || end < start) {
      here.mistake(pair.mark, "expected 0 <= start <= end, got " + brief(pair));
    } else if (start <= previous) {
      here.mistake(pair.mark, concat("expected a start after ", previous,
                                     ", the end of the pair before, got ", brief(pair)));
    }
    previous = std::max(previous, end);
  }
}

}  // namespace

bool is_schedule_key(std::string_view key) {
  return key == "freq" || key == "start_step" || key == "end_step" || key == "start_end_list";
}

void check_schedule_key(std::string_view key, const Node& node, const ConfigPath& path) {
  if (node.is_null()) return;
  if (key == "freq") check_integer(node, path, 1, "an integer of at least 1");
  if (key == "start_step") check_integer(node, path, 0, "an integer of at least 0");
  if (key == "end_step")
    check_integer(node, path, -1, "an integer of at least 0, or -1 for no end");
  if (key == "start_end_list") check_intervals(node, path);
}

}  // namespace te::inspect
