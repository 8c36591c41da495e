#include "ops/check.h"

namespace te::check {

void defined(const TensorView& t, std::string_view op, std::string_view name) {
  require(static_cast<bool>(t), Kind::Value, op, "expected a tensor for ", name, ", got none");
}

void contiguous(const TensorView& t, std::string_view op, std::string_view name) {
  defined(t, op, name);
  require(t.is_contiguous(), Kind::Value, op, "expected ", name, " to be contiguous, got ", t,
          " with other strides");
}

void high_precision(const TensorView& t, std::string_view op, std::string_view name) {
  defined(t, op, name);
  require(is_high_precision(t.dtype), Kind::Type, op, "expected float32, float16 or bfloat16 for ",
          name, ", got ", t.dtype);
}

void dtype(const TensorView& t, DType expected, std::string_view op, std::string_view name) {
  defined(t, op, name);
  require(t.dtype == expected, Kind::Type, op, "expected ", expected, " for ", name, ", got ",
          t.dtype);
}

void same_device(const TensorView& t, const TensorView& like, std::string_view op,
                 std::string_view name) {
  require(t.device == like.device, Kind::Value, op, "expected ", name, " on ", like.device,
          ", got it on ", t.device);
}

void same_shape(const TensorView& t, const TensorView& like, std::string_view op,
                std::string_view name) {
  contiguous(t, op, name);
  same_device(t, like, op, name);
  bool same = t.rank == like.rank;
  for (int i = 0; same && i < t.rank; ++i) same = t.size(i) == like.size(i);
  require(same, Kind::Value, op, "expected shape ", ShapeOf{like}, " for ", name, ", got ",
          ShapeOf{t});
}

void vector(const TensorView& t, int64_t count, DType expected, std::string_view op,
            std::string_view name) {
  contiguous(t, op, name);
  dtype(t, expected, op, name);
  require(t.numel() == count, Kind::Value, op, "expected ", Elements{count}, " for ", name,
          ", got shape ", ShapeOf{t});
}

void vector(const TensorView& t, int64_t count, DType expected, const TensorView& like,
            std::string_view op, std::string_view name) {
  vector(t, count, expected, op, name);
  same_device(t, like, op, name);
}

void input(const TensorView& t, std::string_view op, std::string_view name) {
  high_precision(t, op, name);
  contiguous(t, op, name);
}

void alike(const TensorView& t, DType expected, const TensorView& like, std::string_view op,
           std::string_view name) {
  dtype(t, expected, op, name);
  same_shape(t, like, op, name);
}

void values_like(const TensorView& t, const TensorView& like, std::string_view op,
                 std::string_view name) {
  high_precision(t, op, name);
  same_shape(t, like, op, name);
}

void codes(const TensorView& t, int64_t rows, int64_t cols, const TensorView& like,
           std::string_view op, std::string_view name) {
  contiguous(t, op, name);
  require(size_of(t.dtype) == 1, Kind::Type, op, "expected one-byte codes for ", name, ", got ",
          t.dtype);
  require(t.rows() == rows && t.cols() == cols, Kind::Value, op, "expected ", rows, " x ", cols,
          " codes for ", name, ", got shape ", ShapeOf{t});
  same_device(t, like, op, name);
}

void block_scales(const TensorView& t, ScaleBlocks blocks, int64_t rows, int64_t cols,
                  const TensorView& like, std::string_view op, std::string_view name) {
  contiguous(t, op, name);
  dtype(t, DType::Float32, op, name);
  same_device(t, like, op, name);
  const ScaleGrid grid = scale_grid(blocks, rows, cols);
  require(t.rank == 2 && t.size(0) == grid.rows && t.size(1) == grid.cols, Kind::Value, op,
          "expected shape (", grid.rows, ", ", grid.cols, ") for ", name, " (", blocks, " of a ",
          rows, " x ", cols, " matrix), got ", ShapeOf{t});
}

namespace {

void workspace(const TensorView& t, int64_t needed, const TensorView& like, std::string_view op) {
  contiguous(t, op, "the workspace");
  same_device(t, like, op, "the workspace");
  require(t.bytes() >= needed, Kind::Value, op, "expected a workspace of ", needed, " bytes, got ",
          t.bytes());
}

}  // namespace

void running_amax(const QuantizedView& q, const TensorView& like, std::string_view op) {
  if (!q.amax) return;
  vector(q.amax, 1, DType::Float32, like, op, "amax");
}

void quantized(const QuantizedView& q, int64_t rows, int64_t cols, const TensorView& like,
               std::string_view op) {
  require(is_fp8(q.dtype), Kind::Type, op, "expected an FP8 format, got ", q.dtype);
  if (q.rowwise) codes(q.rowwise, rows, cols, like, op, "the row-wise output");
  if (q.columnwise) codes(q.columnwise, cols, rows, like, op, "the column-wise output");
  vector(q.scales, 2, DType::Float32, like, op, "scales");
  if (q.scale) vector(q.scale, 1, DType::Float32, like, op, "scale");
  running_amax(q, like, op);
}

void column_sum_workspace(const ColumnSumWorkspace& found, const TensorView& like, int64_t rows,
                          int64_t cols, std::string_view op) {
  if (like.device.type == DeviceType::CPU) return;
  workspace(found.memory, column_sum_workspace_bytes(rows, cols), like, op);
}

void dbias(const TensorView& t, const ColumnSumWorkspace& found, const TensorView& like,
           std::string_view op) {
  if (!t) return;
  high_precision(t, op, "dbias");
  vector(t, like.cols(), t.dtype, like, op, "dbias");
  column_sum_workspace(found, like, like.rows(), like.cols(), op);
}

void current_scale(const CurrentScale& s, const TensorView& like, std::string_view op) {
  vector(s.scales, 2, DType::Float32, like, op, "scales");
  vector(s.scratch, 2, DType::Int32, like, op, "the amax scratch");
  if (s.amax) vector(s.amax, 1, DType::Float32, like, op, "amax");
}

void moments(const MomentsSink& out, int fields, const TensorView& like, std::string_view op) {
  vector(out.row, fields, DType::Float64, like, op, "the moments row");
  if (out.active) vector(out.active, 1, DType::Int32, like, op, "active");
  if (like.device.type == DeviceType::CPU) return;
  workspace(out.workspace, moments_workspace_bytes(), like, op);
}

void tile_moments(const MomentsSink& out, const TensorView& like, std::string_view op) {
  if (!out) return;
  moments(out, kMomentsFields, like, op);
  if (like.device.type == DeviceType::CPU) return;
  workspace(out.workspace, tile_moments_workspace_bytes(like.rows(), like.cols()), like, op);
}

}  // namespace te::check
