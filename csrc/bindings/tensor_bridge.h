// The only place where a torch.Tensor becomes a TensorView, and where torch's current stream is
// found. Both use DLPack's C exchange API, which takes about 40 ns for a tensor. A tensor must have
// a supported dtype, be on cpu or cuda, and have memory for its elements. Function arguments of
// type TensorView accept a tensor or None (an absent view).
#pragma once

#include <pybind11/pybind11.h>

#include "core/tensor_view.h"

namespace te::bridge {

namespace py = pybind11;

// False where `object` is not a tensor at all (the caller then raises its usual TypeError).
// Throws te::Error for tensors that cannot be viewed: FakeTensor, meta, unsupported dtype, ...
bool view_of(py::handle object, TensorView& out);

// The stream that torch would launch on for this device; null on the CPU.
Stream current_stream(Device device);

void bind_tensor_bridge(py::module_& m);

}  // namespace te::bridge

namespace pybind11::detail {

template <>
struct type_caster<te::TensorView> {
  PYBIND11_TYPE_CASTER(te::TensorView, const_name("torch.Tensor | None"));

  bool load(handle source, bool) {
    if (source.is_none()) {
      value = te::TensorView{};
      return true;
    }
    return te::bridge::view_of(source, value);
  }
};

}  // namespace pybind11::detail
