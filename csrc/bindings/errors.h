// te::Error -> the Python exception of its kind, for the extension module that calls this.
#pragma once

namespace te::bindings {

void register_errors();

}  // namespace te::bindings
