// transformer_engine/_C: the functions that Python can call. They write to tensors that Python has
// allocated; none returns a tensor that C++ has allocated.
#include "bindings/bindings.h"
#include "bindings/errors.h"
#include "bindings/recording.h"
#include "bindings/tensor_bridge.h"
#include "bindings/workspace.h"

PYBIND11_MODULE(_C, m) {
  m.doc() = "Native operations of transformer_engine.";
  te::bindings::register_errors();
  te::bridge::bind_tensor_bridge(m);
  te::bindings::bind_workspace(m);
  te::bindings::bind_recording(m);
  te::bindings::bind_ops(m);
}
