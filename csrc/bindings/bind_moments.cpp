// Bindings of moments, cast_moments and merge_rows, and of the statistics computed from their rows.
#include <pybind11/stl.h>
#include <pybind11/typing.h>

#include <cstring>
#include <vector>

#include "bindings/bindings.h"
#include "bindings/quantized_args.h"
#include "bindings/recording.h"
#include "bindings/workspace.h"
#include "ops/moments.h"

namespace te::bindings {
namespace {

void moments_into(const TensorView& x, const TensorView& row, const TensorView& active) {
  const Stream stream = bridge::current_stream(x.device);
  moments({.x = x, .out = {row, active, moments_workspace(x.device, stream)}}, stream);
}

void cast_moments_into(const TensorView& x, const TensorView& codes, const TensorView& scales,
                       int format, const TensorView& row, const TensorView& active,
                       bool squared_error) {
  const Stream stream = bridge::current_stream(x.device);
  const auto fp8 = static_cast<DType>(format);
  cast_moments({.x = x,
                .codes = with_format(codes, fp8),
                .format = fp8,
                .scales = scales,
                .out = {row, active, moments_workspace(x.device, stream)},
                .squared_error = squared_error},
               stream);
}

void merge_rows_into(const TensorView& rows, const TensorView& kinds, const TensorView& into,
                     const TensorView& active) {
  merge_rows({.rows = rows, .kinds = kinds, .into = into, .active = active},
             bridge::current_stream(into.device));
}

template <class Row>
Row row_of(const std::vector<double>& fields) {
  constexpr size_t kFields = sizeof(Row) / sizeof(double);
  require(fields.size() == kFields, Kind::Value, "statistics", "expected a row of ", kFields,
          " fields, got ", fields.size());
  Row row;
  std::memcpy(&row, fields.data(), sizeof(row));
  return row;
}

using Named = pybind11::typing::Dict<pybind11::str, double>;

Named statistics_from(const std::vector<double>& fields) {
  using pybind11::arg;
  const Statistics s = statistics_of(row_of<Moments>(fields));
  return Named(arg("min") = s.min, arg("max") = s.max, arg("mean") = s.mean, arg("std") = s.std,
               arg("l1_norm") = s.l1_norm, arg("l2_norm") = s.l2_norm, arg("cur_amax") = s.cur_amax,
               arg("dynamic_range") = s.dynamic_range);
}

Named cast_statistics_from(const std::vector<double>& fields) {
  using pybind11::arg;
  const CastStatistics s = statistics_of(row_of<CastMoments>(fields));
  return Named(arg("underflows%") = s.underflows_percent, arg("overflows%") = s.overflows_percent,
               arg("mse") = s.mse, arg("scale_inv_min") = s.min_scale_inv,
               arg("scale_inv_max") = s.max_scale_inv);
}

}  // namespace

void bind_moments(pybind11::module_& m) {
  using pybind11::arg;
  m.def("moments", recordable<&moments_into>, arg("x"), arg("row"), arg("active"));
  m.def("cast_moments", recordable<&cast_moments_into>, arg("x"), arg("codes"), arg("scales"),
        arg("format"), arg("row"), arg("active"), arg("squared_error") = true);
  m.def("merge_rows", recordable<&merge_rows_into>, arg("rows"), arg("kinds"), arg("into"),
        arg("active"));
  m.def("statistics", &statistics_from, arg("row"));
  m.def("cast_statistics", &cast_statistics_from, arg("row"));
}

}  // namespace te::bindings
