// transformer_engine/_C: the list of what Python can call. Every entry writes into tensors that
// Python allocated; none returns a tensor.
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
