// Checks that every op header's .cpp shares, so that the same mistake reads the same everywhere.
#pragma once

#include "core/quantized_view.h"
#include "core/scale_blocks.h"
#include "core/tensor_view.h"
#include "ops/moments.h"

namespace te::check {

// Present, contiguous, and with data where it has elements.
void defined(const TensorView& t, std::string_view op, std::string_view name);
void contiguous(const TensorView& t, std::string_view op, std::string_view name);
// fp32, fp16 or bf16.
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
// `same_shape` of a dtype, or of fp32, fp16 or bf16.
void alike(const TensorView& t, DType expected, const TensorView& like, std::string_view op,
           std::string_view name);
void values_like(const TensorView& t, const TensorView& like, std::string_view op,
                 std::string_view name);
// One-byte codes of a [rows, cols] value on the device of `like`.
void codes(const TensorView& t, int64_t rows, int64_t cols, const TensorView& like,
           std::string_view op, std::string_view name);
// The inverse scales of the blocks of a [rows, cols] matrix.
void block_scales(const TensorView& t, ScaleBlocks blocks, int64_t rows, int64_t cols,
                  const TensorView& like, std::string_view op, std::string_view name);
// The amax that a producer raises, whether or not it writes codes; may be absent.
void running_amax(const QuantizedView& q, const TensorView& like, std::string_view op);
// All parts of an FP8 result for a [rows, cols] value on the device of `like`.
void quantized(const QuantizedView& q, int64_t rows, int64_t cols, const TensorView& like,
               std::string_view op);
// Room for the partial column sums of a [rows, cols] value; nothing is needed on the CPU.
void column_sum_workspace(const TensorView& t, const TensorView& like, int64_t rows, int64_t cols,
                          std::string_view op);
// The column sums of `like`, and the memory that making them takes; both may be absent.
void dbias(const TensorView& t, const TensorView& memory, const TensorView& like,
           std::string_view op);
void current_scale(const CurrentScale& s, const TensorView& like, std::string_view op);
// A row of so many fields, its flag and its workspace, for a tensor on the device of `like`.
void moments(const MomentsSink& out, int fields, const TensorView& like, std::string_view op);
// The same for moments that an op takes beside its work, of a value like that; may be absent.
void tile_moments(const MomentsSink& out, const TensorView& like, std::string_view op);

}  // namespace te::check
