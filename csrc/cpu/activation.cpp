// The CPU backend of the activations, which defines their results: see ops/activation.h. Each row
// is computed into a buffer of fp32 and written to a RowSink. The bias gradient is summed in fp64
// over blocks of rows, then over the blocks in order, so that its result does not depend on the
// number of threads.
#include "ops/activation.h"

#include <algorithm>
#include <vector>

#include "cpu/parallel_max.h"
#include "cpu/row_sink.h"

namespace te::cpu {
namespace {

constexpr int64_t kRowsPerBlock = 64;
constexpr int64_t kElementsPerThread = 1 << 16;

template <class In, class Unit, class Factor>
void forward_row(const Unit& unit, const Factor& factor, const In* x, std::vector<float>& y) {
  const size_t n = y.size();
  for (size_t j = 0; j < n; ++j) {
    y[j] = unit.value(static_cast<float>(x[j]));
    if constexpr (Factor::kGated) y[j] *= factor.value(static_cast<float>(x[n + j]));
  }
}

template <class In, class Unit, class Factor>
void backward_row(const Unit& unit, const Factor& factor, const In* dy, const In* x,
                  std::vector<float>& dx) {
  const size_t n = Factor::kGated ? dx.size() / 2 : dx.size();
  for (size_t j = 0; j < n; ++j) {
    const float x1 = static_cast<float>(x[j]), out = static_cast<float>(dy[j]);
    if constexpr (Factor::kGated) {
      const float x2 = static_cast<float>(x[n + j]);
      const auto [value, gradient] = unit.value_and_gradient(x1, out * factor.value(x2));
      dx[j] = gradient;
      dx[n + j] = factor.gradient(x2, out * value);
    } else {
      dx[j] = unit.value_and_gradient(x1, out).gradient;
    }
  }
}

// Calls compute(row, values), which fills one row of [rows, cols], for all rows. Each row is
// written to the sink and, if requested, added to the column sums.
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

// Calls f(tag of the dtype, unit, factor): turns the run-time choices of a call into types.
template <class Args, class F>
void dispatch(const Args& args, F&& f) {
  dispatch_high_precision(args.x.dtype, "activation", [&](auto tag) {
    dispatch_activation(args.kind, args.parameters,
                        [&](auto unit, auto factor) { f(tag, unit, factor); });
  });
}

// Writes y to the sink. `args` are those of the forward or of the backward.
template <class Args>
void forward_rows(const Args& args, int64_t cols, const RowSink& sink, bool rounded) {
  const int64_t width = args.x.cols();
  dispatch(args, [&](auto tag, auto unit, auto factor) {
    using In = typename decltype(tag)::type;
    for_each_row(args.x.rows(), cols, sink, {}, [&](int64_t row, std::vector<float>& y) {
      forward_row(unit, factor, args.x.template ptr<In>() + row * width, y);
      if (!rounded) return;
      for (float& value : y) value = static_cast<float>(In(value));
    });
  });
}

}  // namespace

void activation_forward(const ActivationForwardArgs& args) {
  const int64_t rows = args.x.rows(), cols = args.x.cols() / (is_gated(args.kind) ? 2 : 1);
  forward_rows(args, cols, RowSink(rows, cols, args.y, args.quantized, args.current), false);
  if (args.moments) cpu::moments({args.y, args.moments});
}

void activation_backward(const ActivationBackwardArgs& args) {
  const int64_t rows = args.x.rows(), width = args.x.cols(), n = args.dy.cols();
  const RowSink sink(rows, width, args.dx, args.quantized, args.current);
  dispatch(args, [&](auto tag, auto unit, auto factor) {
    using In = typename decltype(tag)::type;
    for_each_row(rows, width, sink, args.dbias, [&](int64_t row, std::vector<float>& dx) {
      backward_row(unit, factor, args.dy.ptr<In>() + row * n, args.x.ptr<In>() + row * width, dx);
    });
  });
  const auto& [y, quantized, rounded] = args.again;
  if (args.again) forward_rows(args, n, RowSink(rows, n, y, quantized, {}), rounded);  // dy is read
  if (args.moments) cpu::moments({args.dx, args.moments});
}

}  // namespace te::cpu
