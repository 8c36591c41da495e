// Better messages for the errors of yaml-cpp.
#pragma once

#include <string>
#include <string_view>

#include "inspect/source_text.h"

namespace te::inspect {

// Explains what is wrong with the text at an offset. `message` is that of yaml-cpp, and is returned
// if nothing better is known.
std::string explain_yaml_error(const SourceText& source, size_t offset, std::string_view message);

}  // namespace te::inspect
