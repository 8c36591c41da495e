// Checks the schedule keys of a feature: freq, start_step, end_step, start_end_list.
#pragma once

#include <string_view>

#include "inspect/config_path.h"

namespace te::inspect {

bool is_schedule_key(std::string_view key);

// Checks one of the keys; null means its default.
void check_schedule_key(std::string_view key, const Node& node, const ConfigPath& path);

}  // namespace te::inspect
