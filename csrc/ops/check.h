// Checks of arguments that all ops share, so that the same mistake gives the same message
// everywhere. `t` is the tensor that is checked, `op` and `name` are for the message.
#pragma once

#include "core/quantized_view.h"
#include "core/scale_blocks.h"
#include "core/tensor_view.h"
#include "ops/column_sum.h"
#include "ops/moments.h"

namespace te::check {

// Not absent.
void defined(const TensorView& t, std::string_view op, std::string_view name);
// Not absent, and contiguous.
void contiguous(const TensorView& t, std::string_view op, std::string_view name);
// Not absent, and fp32, fp16 or bf16.
void high_precision(const TensorView& t, std::string_view op, std::string_view name);
void dtype(const TensorView& t, DType expected, std::string_view op, std::string_view name);
void same_device(const TensorView& t, const TensorView& like, std::string_view op,
                 std::string_view name);
// Same sizes as `like`, contiguous, same device.
void same_shape(const TensorView& t, const TensorView& like, std::string_view op,
                std::string_view name);
// A contiguous vector of `count` elements.
void vector(const TensorView& t, int64_t count, DType expected, std::string_view op,
            std::string_view name);
// The same, on the device of `like`.
void vector(const TensorView& t, int64_t count, DType expected, const TensorView& like,
            std::string_view op, std::string_view name);
// A contiguous tensor of fp32, fp16 or bf16.
void input(const TensorView& t, std::string_view op, std::string_view name);
// `same_shape`, and the dtype `expected`.
void alike(const TensorView& t, DType expected, const TensorView& like, std::string_view op,
           std::string_view name);
// `same_shape`, and fp32, fp16 or bf16.
void values_like(const TensorView& t, const TensorView& like, std::string_view op,
                 std::string_view name);
// One-byte codes of a [rows, cols] value on the device of `like`.
void codes(const TensorView& t, int64_t rows, int64_t cols, const TensorView& like,
           std::string_view op, std::string_view name);
// The inverse scales of the blocks of a [rows, cols] matrix.
void block_scales(const TensorView& t, ScaleBlocks blocks, int64_t rows, int64_t cols,
                  const TensorView& like, std::string_view op, std::string_view name);
// The amax of an FP8 result, which an op updates even if it writes no codes; may be absent.
void running_amax(const QuantizedView& q, const TensorView& like, std::string_view op);
// All members of an FP8 result for a [rows, cols] value on the device of `like`.
void quantized(const QuantizedView& q, int64_t rows, int64_t cols, const TensorView& like,
               std::string_view op);
// A workspace for the partial column sums of a [rows, cols] value; not needed on the CPU.
void column_sum_workspace(const ColumnSumWorkspace& found, const TensorView& like, int64_t rows,
                          int64_t cols, std::string_view op);
// A bias gradient (column sums of `like`) and its workspace; both may be absent.
void dbias(const TensorView& t, const ColumnSumWorkspace& found, const TensorView& like,
           std::string_view op);
void current_scale(const CurrentScale& s, const TensorView& like, std::string_view op);
// A row of `fields` doubles, its flag and its workspace, for a tensor on the device of `like`.
void moments(const MomentsSink& out, int fields, const TensorView& like, std::string_view op);
// The same for moments that an op takes of its input or result, whose shape is that of `like`; may
// be absent.
void tile_moments(const MomentsSink& out, const TensorView& like, std::string_view op);

}  // namespace te::check
