// register_errors() translates te::Error to the Python exception of its kind, in the extension
// module that calls it.
#pragma once

namespace te::bindings {

void register_errors();

}  // namespace te::bindings
