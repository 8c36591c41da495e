// Scratch memory of kernels: one buffer per (purpose, device, stream), grown when needed.
//
// Work on one stream is ordered, so the next op may overwrite what the last one left there. Python
// allocates, so that torch's allocator sees the memory; the table here keeps it and finds it again
// without Python. It is zero before any kernel reads it, also where a capture is its first use:
// several graphs and calls may share it, in any order. A buffer that was outgrown is kept: a
// captured graph may still write into it.
#pragma once

#include <pybind11/pybind11.h>

#include "core/tensor_view.h"
#include "ops/moments.h"

namespace te::bindings {

// The product's own scratch, 32 MiB on CUDA; absent on the CPU.
TensorView gemm_workspace(Device device, Stream stream);

// Partial column sums of a [rows, cols] value; absent on the CPU, which needs none.
TensorView column_sum_workspace(Device device, Stream stream, int64_t rows, int64_t cols);

// What blocks leave for each other when they take moments, by the way of a [rows, cols] value or
// in a pass of their own; absent on the CPU.
TensorView moments_workspace(Device device, Stream stream, int64_t rows = 0, int64_t cols = 0);

// Where an op leaves the moments of a value like x; may be absent.
MomentsSink moments_sink(const TensorView& row, const TensorView& active, const TensorView& x,
                         Stream stream);

// Buffers that are kept have at most so many bytes; to ask torch for one costs as much as a launch.
constexpr int64_t kLargestScratch = 32 * 1024 * 1024;

// What cuDNN's attention asks for, on CUDA.
TensorView attention_workspace(Device device, Stream stream, int64_t bytes);

// What ops of one recorded call leave for each other, until it has launched all of them. Where
// Python runs meanwhile, another thread may start a call on the same stream: it finds no memory
// here. Nor does a call on the CPU, or one that needs more than kLargestScratch.
class RecordingScratch {
 public:
  RecordingScratch(Device device, int64_t bytes);
  ~RecordingScratch();
  RecordingScratch(const RecordingScratch&) = delete;
  RecordingScratch& operator=(const RecordingScratch&) = delete;

  const TensorView& view() const { return view_; }

 private:
  TensorView view_;
  bool* leased_ = nullptr;
};

// A tensor of that many bytes, for one call that needs more.
pybind11::object large_scratch(Device device, int64_t bytes);

// int32 [2], all zero: kernels that find an amax leave it zero again. Tensors of one launch have
// different numbers.
TensorView amax_scratch(Device device, Stream stream, size_t number = 0);

void bind_workspace(pybind11::module_& m);

}  // namespace te::bindings
