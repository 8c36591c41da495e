#include "bindings/errors.h"

#include <pybind11/pybind11.h>

#include "core/error.h"

namespace te::bindings {

void register_errors() {
  pybind11::register_local_exception_translator([](std::exception_ptr thrown) {
    try {
      if (thrown) std::rethrow_exception(thrown);
    } catch (const Error& error) {
      const auto type = [&] {
        switch (error.kind()) {
          case Kind::Value: return PyExc_ValueError;
          case Kind::Type: return PyExc_TypeError;
          case Kind::Unsupported: return PyExc_NotImplementedError;
          case Kind::Runtime:
          case Kind::Internal: return PyExc_RuntimeError;
        }
        return PyExc_RuntimeError;
      }();
      PyErr_SetString(type, error.what());
    }
  });
}

}  // namespace te::bindings
