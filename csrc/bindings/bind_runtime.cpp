// Build facts and process settings.
#include <pybind11/stl.h>

#include "bindings/bindings.h"
#include "core/parallel.h"
#include "cuda/left_out.h"
#include "cuda/runtime.h"

namespace te::bindings {

void bind_runtime(pybind11::module_& m) {
  m.def("built_with_cuda", &cuda::built_with_cuda);
  m.def("left_out", [] {
    std::vector<std::tuple<std::string, std::string, std::string>> rows;
    for (const cuda::LeftOut& one : cuda::left_out())
      rows.emplace_back(one.part, one.reason, one.command);
    return rows;
  });
  m.def("cuda_device_count", &cuda::device_count);
  m.def("set_library_path", &cuda::set_library_path, pybind11::arg("name"), pybind11::arg("path"));
  m.def("set_num_threads", &set_num_threads, pybind11::arg("count"));
  m.def("num_threads", &num_threads);
}

}  // namespace te::bindings
