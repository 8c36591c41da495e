// The CPU backend of the norms, which defines their results: see ops/norm.h. Sums are taken in
// fp64, and the arithmetic on each element is in fp32. Threads share the rows. The parameter
// gradients are summed per column in the order of rows, so no result depends on the number of
// threads.
#include "ops/norm.h"

#include <algorithm>
#include <cmath>
#include <vector>

#include "core/parallel.h"
#include "cpu/column_sum.h"
#include "cpu/row_sink.h"

namespace te::cpu {
namespace {

constexpr int64_t kElementsPerThread = 1 << 17;

using Row = std::vector<float>;

int64_t row_grain(int64_t cols) { return kElementsPerThread / cols + 1; }

// The sum of value(j) over j < count, in eight partial sums that the compiler can vectorise.
template <class Value>
double sum_of(size_t count, Value&& value) {
  constexpr size_t kLanes = 8;
  double lanes[kLanes] = {};
  size_t j = 0;
  for (; j + kLanes <= count; j += kLanes)
    for (size_t k = 0; k < kLanes; ++k) lanes[k] += value(j + k);
  for (; j < count; ++j) lanes[0] += value(j);
  double sum = 0.0;
  for (const double lane : lanes) sum += lane;
  return sum;
}

Row to_float(const TensorView& vector, float offset) {
  Row values(static_cast<size_t>(vector ? vector.numel() : 0));
  if (!vector) return values;
  dispatch_high_precision(vector.dtype, "norm", [&](auto tag) {
    const auto* from = vector.ptr<typename decltype(tag)::type>();
    for (size_t j = 0; j < values.size(); ++j) values[j] = offset + static_cast<float>(from[j]);
  });
  return values;
}

template <class In>
void load(const In* from, Row& row) {
  for (size_t j = 0; j < row.size(); ++j) row[j] = static_cast<float>(from[j]);
}

// Replaces `row` by x - mean, and returns the mean. The mean is subtracted as a sum of two floats,
// so that rounding it to fp32 adds no error to rows that are far from zero.
double subtract_mean(Row& row) {
  const double mean = sum_of(row.size(), [&](size_t j) { return static_cast<double>(row[j]); }) /
                      static_cast<double>(row.size());
  const float high = static_cast<float>(mean);
  const float low = static_cast<float>(mean - static_cast<double>(high));
  for (float& value : row) value = (value - high) - low;
  return mean;
}

float reciprocal_deviation(const Row& row, float epsilon) {
  const double squares = sum_of(row.size(), [&](size_t j) {
    const double value = static_cast<double>(row[j]);
    return value * value;
  });
  const double variance = squares / static_cast<double>(row.size());
  return static_cast<float>(1.0 / std::sqrt(variance + static_cast<double>(epsilon)));
}

template <class In>
void forward(const NormForwardArgs& args) {
  const int64_t rows = args.x.rows(), cols = args.x.cols();
  const Row gamma = to_float(args.gamma, args.zero_centered ? 1.0f : 0.0f);
  const Row beta = to_float(args.beta, 0.0f);
  const RowSink sink(rows, cols, args.y, args.quantized, args.current);
  sink.write_all(row_grain(cols), [&](int64_t i, Row& row) {
    load(args.x.ptr<In>() + i * cols, row);
    if (args.mean) args.mean.ptr<float>()[i] = static_cast<float>(subtract_mean(row));
    const float rstd = reciprocal_deviation(row, args.epsilon);
    args.rstd.ptr<float>()[i] = rstd;
    for (size_t j = 0; j < row.size(); ++j) row[j] = row[j] * rstd * gamma[j];
    for (size_t j = 0; j < beta.size(); ++j) row[j] += beta[j];
  });
}

// dx = rstd * (g * dy - mean(g * dy) - xhat * mean(g * dy * xhat)), without the first mean in
// RMSNorm.
void backward_row(const Row& gamma, bool centered, float rstd, const Row& xhat, Row& grad) {
  const auto cols = static_cast<double>(grad.size());
  for (size_t j = 0; j < grad.size(); ++j) grad[j] *= gamma[j];
  const double along = sum_of(grad.size(), [&](size_t j) {
    return static_cast<double>(grad[j]) * static_cast<double>(xhat[j]);
  });
  const double offset =
      centered ? sum_of(grad.size(), [&](size_t j) { return static_cast<double>(grad[j]); }) : 0.0;
  const float along_mean = static_cast<float>(along / cols);
  const float offset_mean = static_cast<float>(offset / cols);
  for (size_t j = 0; j < grad.size(); ++j)
    grad[j] = rstd * (grad[j] - offset_mean - xhat[j] * along_mean);
}

template <class In, class Gradient>
void backward_data(const NormBackwardArgs& args) {
  const int64_t cols = args.x.cols();
  const Row gamma = to_float(args.gamma, args.zero_centered ? 1.0f : 0.0f);
  parallel_for(args.x.rows(), row_grain(cols), [&](int64_t first, int64_t last) {
    Row xhat(static_cast<size_t>(cols)), grad(static_cast<size_t>(cols));
    for (int64_t i = first; i < last; ++i) {
      const float mean = args.mean ? args.mean.ptr<float>()[i] : 0.0f;
      const float rstd = args.rstd.ptr<float>()[i];
      load(args.x.ptr<In>() + i * cols, xhat);
      load(args.dy.ptr<Gradient>() + i * cols, grad);
      for (float& value : xhat) value = (value - mean) * rstd;
      backward_row(gamma, static_cast<bool>(args.mean), rstd, xhat, grad);
      if (args.residual_grad) {
        const In* residual = args.residual_grad.ptr<In>() + i * cols;
        for (size_t j = 0; j < grad.size(); ++j) grad[j] += static_cast<float>(residual[j]);
      }
      In* dx = args.dx.ptr<In>() + i * cols;
      for (size_t j = 0; j < grad.size(); ++j) dx[j] = In(grad[j]);
    }
  });
}

template <class In, class Gradient>
void backward_params(const NormBackwardArgs& args) {
  const int64_t rows = args.x.rows(), cols = args.x.cols();
  const In* x = args.x.ptr<In>();
  const Gradient* dy = args.dy.ptr<Gradient>();
  const float* mean = args.mean.ptr<float>();
  const float* rstd = args.rstd.ptr<float>();
  column_sum(args.dgamma, rows, cols, [&](int64_t i, int64_t j) {
    const float value = static_cast<float>(x[i * cols + j]);
    const float xhat = (mean ? value - mean[i] : value) * rstd[i];
    return static_cast<float>(dy[i * cols + j]) * xhat;
  });
  if (!args.dbeta) return;
  column_sum(args.dbeta, args.dy);
}

}  // namespace

void norm_forward(const NormForwardArgs& args) {
  dispatch_high_precision(args.x.dtype, "norm_forward",
                          [&](auto tag) { forward<typename decltype(tag)::type>(args); });
  if (args.moments) cpu::moments({args.y, args.moments});
}

void norm_backward(const NormBackwardArgs& args) {
  dispatch_high_precision(args.x.dtype, "norm_backward", [&](auto tag) {
    using In = typename decltype(tag)::type;
    dispatch_high_precision(args.dy.dtype, "norm_backward", [&](auto gradient_tag) {
      using Gradient = typename decltype(gradient_tag)::type;
      backward_data<In, Gradient>(args);
      backward_params<In, Gradient>(args);
    });
  });
}

}  // namespace te::cpu
