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
  te::bindings::bind_runtime(m);
  te::bindings::bind_workspace(m);
  te::bindings::bind_recording(m);
  te::bindings::bind_gemm(m);
  te::bindings::bind_activation(m);
  te::bindings::bind_cast(m);
  te::bindings::bind_norm(m);
  te::bindings::bind_quantize(m);
  te::bindings::bind_dequantize(m);
  te::bindings::bind_scaling(m);
  te::bindings::bind_moments(m);
  te::bindings::bind_softmax(m);
  te::bindings::bind_cross_entropy(m);
  te::bindings::bind_adam(m);
  te::bindings::bind_dropout_add(m);
  te::bindings::bind_rope(m);
  te::bindings::bind_attention(m);
  te::bindings::bind_peer_memory(m);
}
