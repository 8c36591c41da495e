// Bindings of facts about the build and the devices, and of settings of the process.
#include <pybind11/stl.h>

#include "bindings/bindings.h"
#include "core/parallel.h"
#include "cuda/left_out.h"
#include "cuda/runtime.h"

namespace te::bindings {
namespace {

namespace py = pybind11;

// The limits as a dict by the names of the fields, for transformer_engine/_devices.py.
py::dict named(const cuda::DeviceLimits& limits) {
  using py::arg;
  return py::dict(
      arg("capability") = limits.capability, arg("code") = limits.code,
      arg("multiprocessors") = limits.multiprocessors, arg("shared_bytes") = limits.shared_bytes,
      arg("cluster") = limits.cluster, arg("dependent_launch") = limits.dependent_launch,
      arg("fp8_conversion") = limits.fp8_conversion, arg("fp8_products") = limits.fp8_products,
      arg("block_scales") = limits.block_scales);
}

}  // namespace

void bind_runtime(pybind11::module_& m) {
  m.def("built_with_cuda", &cuda::built_with_cuda);
  m.def("left_out", [] {
    std::vector<std::tuple<std::string, std::string, std::string>> rows;
    for (const cuda::LeftOut& one : cuda::left_out())
      rows.emplace_back(one.part, one.reason, one.command);
    return rows;
  });
  m.def(
      "device_limits", [](int index) { return named(cuda::limits_of_device(index)); },
      py::arg("index"));
  m.def(
      "device_limits_of",
      [](int capability, int code, int multiprocessors, int64_t shared_bytes, bool fp8_products,
         bool clusters, bool dependent_launch, int64_t shared_bytes_allowed) {
        return named(
            cuda::limits_of({capability, code, multiprocessors, shared_bytes},
                            {fp8_products, clusters, dependent_launch, shared_bytes_allowed}));
      },
      py::arg("capability"), py::arg("code"), py::arg("multiprocessors"), py::arg("shared_bytes"),
      py::arg("fp8_products") = true, py::arg("clusters") = true,
      py::arg("dependent_launch") = true, py::arg("shared_bytes_allowed") = 0);
  m.def(
      "set_device_switches",
      [](bool fp8_products, bool clusters, bool dependent_launch, int64_t shared_bytes) {
        cuda::set_device_switches({fp8_products, clusters, dependent_launch, shared_bytes});
      },
      py::arg("fp8_products"), py::arg("clusters"), py::arg("dependent_launch"),
      py::arg("shared_bytes"));
  m.def("set_library_path", &cuda::set_library_path, pybind11::arg("name"), pybind11::arg("path"));
  m.def("relax_captures", &cuda::relax_captures);
  m.def("set_num_threads", &set_num_threads, pybind11::arg("count"));
}

}  // namespace te::bindings
