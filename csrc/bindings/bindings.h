// What module.cpp calls: one function per op family, each in its own bind_<op>.cpp.
#pragma once

#include <pybind11/pybind11.h>

namespace te::bindings {

void bind_runtime(pybind11::module_& m);
void bind_gemm(pybind11::module_& m);
void bind_activation(pybind11::module_& m);
void bind_cast(pybind11::module_& m);
void bind_norm(pybind11::module_& m);
void bind_quantize(pybind11::module_& m);
void bind_dequantize(pybind11::module_& m);
void bind_scaling(pybind11::module_& m);
void bind_moments(pybind11::module_& m);
void bind_adam(pybind11::module_& m);
void bind_cross_entropy(pybind11::module_& m);
void bind_softmax(pybind11::module_& m);
void bind_dropout_add(pybind11::module_& m);
void bind_rope(pybind11::module_& m);
void bind_attention(pybind11::module_& m);
void bind_peer_memory(pybind11::module_& m);

}  // namespace te::bindings
