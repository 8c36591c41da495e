// What is wrong where yaml-cpp stops reading, in words that help to mend it.
#pragma once

#include <string>
#include <string_view>

#include "inspect/source_text.h"

namespace te::inspect {

// `message` is yaml-cpp's own, which is returned where nothing better is known.
std::string explain_yaml_error(const SourceText& source, size_t offset, std::string_view message);

}  // namespace te::inspect
