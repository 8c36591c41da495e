// Scratch memory of kernels: one buffer per (purpose, device, stream), grown when needed.
//
// The work of one stream is ordered, so the next op may overwrite the scratch memory of the last
// one. Python allocates the memory, so that torch's allocator knows it, and a table in C++ keeps
// it, so that later calls need no Python. A buffer is zero before any kernel reads it, even if it
// is allocated during a capture, so several graphs and calls may share it in any order. But graphs
// that were captured on one stream must not be replayed at the same time. When a buffer is replaced
// by a larger one, the old one is kept, because a captured graph may still write into it.
#pragma once

#include <pybind11/pybind11.h>

#include <utility>

#include "bindings/tensor_bridge.h"
#include "core/tensor_view.h"
#include "ops/column_sum.h"
#include "ops/moments.h"

namespace te::bindings {

// The workspace of a GEMM, 32 MiB on CUDA and absent on the CPU, and whether the GEMM counts tiles.
// The answer is that of `counts_tiles` in Python when the first GEMM of the stream runs.
std::pair<TensorView, bool> gemm_workspace(Device device, Stream stream);

// The column sums of a running recording that one launch adds up at its end, instead of a launch
// after each op. Until then, every op has its own part of the memory. Another recording that runs
// meanwhile on the same stream leaves its sums to its ops, and so do recordings on the CPU.
class SumsAtEnd {
 public:
  explicit SumsAtEnd(Device device);
  ~SumsAtEnd();
  SumsAtEnd(const SumsAtEnd&) = delete;
  SumsAtEnd& operator=(const SumsAtEnd&) = delete;

  bool usable() const { return leased_ != nullptr; }
  ColumnSumWorkspace workspace(int64_t rows, int64_t cols);
  void add_up() const;

 private:
  Device device_;
  Stream stream_;
  bool* leased_ = nullptr;
  ColumnSums sums_;
  char* begin_ = nullptr;  // of the buffer
  char* free_ = nullptr;   // its first byte that is not in use
  char* end_ = nullptr;
  size_t seen_ = 0;  // number of sums that lie before free_
};

// An output of sums over rows: an argument that Python passes as a tensor or None.
struct SumsOutput {
  TensorView to;
  SumsAtEnd* later = nullptr;  // of the recording that runs the op, if it adds up these sums
};

// Memory for partial sums of x over its rows, of this output and others that follow it, `count` in
// all. Absent if the output is, and on the CPU, which needs none.
ColumnSumWorkspace column_sum_workspace(const SumsOutput& output, const TensorView& x,
                                        Stream stream, int64_t count = 1);

// The workspace in which the blocks of a kernel merge moments; absent on the CPU. `rows` and `cols`
// are the sizes of the value if an op takes moments beside its work, and 0 for the op `moments`.
TensorView moments_workspace(Device device, Stream stream, int64_t rows = 0, int64_t cols = 0);

// The sink for the moments of a value with the sizes of x; absent if `row` is.
MomentsSink moments_sink(const TensorView& row, const TensorView& active, const TensorView& x,
                         Stream stream);

// Attention and recordings keep buffers of at most this many bytes, because to ask torch for memory
// in each call costs as much as a launch. Larger ones are allocated for one call.
constexpr int64_t kLargestScratch = 32 * 1024 * 1024;

// The workspace of cuDNN's attention, on CUDA.
TensorView attention_workspace(Device device, Stream stream, int64_t bytes);

// The scratch memory of a running recording, through which its ops pass tensors, until it has
// launched all ops. If Python code runs meanwhile, another thread may run a recording on the same
// stream: for that one, view() is absent, and it allocates its own memory. view() is also absent on
// the CPU, and for more than kLargestScratch.
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

// A new tensor of this many bytes, for a call that needs more than kLargestScratch.
pybind11::object large_scratch(Device device, int64_t bytes);

// The scratch memory of an amax: int32 [2], zero before and after each kernel. If one launch takes
// several tensors, each has its own `number`.
TensorView amax_scratch(Device device, Stream stream, size_t number = 0);

void bind_workspace(pybind11::module_& m);

}  // namespace te::bindings

namespace pybind11::detail {

template <>
struct type_caster<te::bindings::SumsOutput> {
  PYBIND11_TYPE_CASTER(te::bindings::SumsOutput, const_name("torch.Tensor | None"));

  bool load(handle source, bool convert) {
    type_caster<te::TensorView> tensor;
    if (!tensor.load(source, convert)) return false;
    value.to = tensor;
    return true;
  }
};

}  // namespace pybind11::detail
