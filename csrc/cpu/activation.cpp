// The meaning of the activations: see ops/activation.h. Rows are computed into a buffer of fp32 and
// handed to the sink; the bias gradient is summed in fp64 over blocks of rows, then over the blocks
// in order, so that its result does not depend on the number of threads.
#include "ops/activation.h"

#include <algorithm>
#include <vector>

#include "cpu/parallel_max.h"
#include "cpu/row_sink.h"

namespace te::cpu {
namespace {

constexpr int64_t kRowsPerBlock = 64;
constexpr int64_t kElementsPerThread = 1 << 16;

template <class In, class Unit>
void forward_row(const Unit& unit, bool gated, const In* x, std::vector<float>& y) {
  const size_t n = y.size();
  for (size_t j = 0; j < n; ++j) y[j] = unit.value(static_cast<float>(x[j]));
  if (!gated) return;
  for (size_t j = 0; j < n; ++j) y[j] *= static_cast<float>(x[n + j]);
}

template <class In, class Unit>
void backward_row(const Unit& unit, bool gated, const In* dy, const In* x, std::vector<float>& dx) {
  const size_t n = gated ? dx.size() / 2 : dx.size();
  for (size_t j = 0; j < n; ++j) {
    const float out = static_cast<float>(dy[j]);
    const float scale = gated ? static_cast<float>(x[n + j]) : 1.0f;
    const auto [value, gradient] = unit.value_and_gradient(static_cast<float>(x[j]), out * scale);
    dx[j] = gradient;
    if (gated) dx[n + j] = out * value;
  }
}

// compute(row, values) fills one row of [rows, cols]; then the sink and, where asked for, the
// column sums take it.
template <class Compute>
void for_each_row(int64_t rows, int64_t cols, const RowSink& sink, const TensorView& column_sums,
                  Compute&& compute) {
  const int64_t blocks = (rows + kRowsPerBlock - 1) / kRowsPerBlock;
  std::vector<double> sums(static_cast<size_t>(column_sums ? blocks * cols : 0), 0.0);
  const int64_t grain = std::max<int64_t>(1, kElementsPerThread / (kRowsPerBlock * cols + 1));
  sink.finish(parallel_max(blocks, grain, [&](int64_t first, int64_t last) {
    std::vector<float> values(static_cast<size_t>(cols));
    float amax = 0.0f;
    const int64_t end = std::min(rows, last * kRowsPerBlock);
    for (int64_t row = first * kRowsPerBlock; row < end; ++row) {
      compute(row, values);
      amax = std::max(amax, sink.write(row, values));
      if (!column_sums) continue;
      double* block_sums = sums.data() + row / kRowsPerBlock * cols;
      for (const float value : values) *block_sums++ += static_cast<double>(value);
    }
    return amax;
  }));
  if (!column_sums) return;
  dispatch_high_precision(column_sums.dtype, "activation_backward", [&](auto tag) {
    using Out = typename decltype(tag)::type;
    for (int64_t j = 0; j < cols; ++j) {
      double sum = 0.0;
      for (int64_t block = 0; block < blocks; ++block)
        sum += sums[static_cast<size_t>(block * cols + j)];
      column_sums.ptr<Out>()[j] = Out(static_cast<float>(sum));
    }
  });
}

// f(tag of the dtype, unit): the two run-time choices of every call.
template <class F>
void dispatch(DType dtype, ActivationKind kind, F&& f) {
  dispatch_high_precision(dtype, "activation", [&](auto tag) {
    dispatch_activation(kind, [&](auto unit) { f(tag, unit); });
  });
}

}  // namespace

void activation_forward(const ActivationForwardArgs& args) {
  const bool gated = is_gated(args.kind);
  const int64_t rows = args.x.rows(), width = args.x.cols(), cols = gated ? width / 2 : width;
  const RowSink sink(rows, cols, args.y, args.quantized, args.current);
  dispatch(args.x.dtype, args.kind, [&](auto tag, auto unit) {
    using In = typename decltype(tag)::type;
    for_each_row(rows, cols, sink, {}, [&](int64_t row, std::vector<float>& y) {
      forward_row(unit, gated, args.x.ptr<In>() + row * width, y);
    });
  });
  if (args.moments) cpu::moments({args.y, args.moments});
}

void activation_backward(const ActivationBackwardArgs& args) {
  const bool gated = is_gated(args.kind);
  const int64_t rows = args.x.rows(), width = args.x.cols(), n = gated ? width / 2 : width;
  const RowSink sink(rows, width, args.dx, args.quantized, args.current);
  dispatch(args.x.dtype, args.kind, [&](auto tag, auto unit) {
    using In = typename decltype(tag)::type;
    for_each_row(rows, width, sink, args.dbias, [&](int64_t row, std::vector<float>& dx) {
      backward_row(unit, gated, args.dy.ptr<In>() + row * n, args.x.ptr<In>() + row * width, dx);
    });
  });
  if (args.moments) cpu::moments({args.dx, args.moments});
}

}  // namespace te::cpu
