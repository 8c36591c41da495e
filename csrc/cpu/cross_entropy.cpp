// The CPU backend of cross entropy, which defines its results: see ops/cross_entropy.h. Threads
// share the rows.
#include "ops/cross_entropy.h"

#include <cmath>
#include <limits>
#include <vector>

#include "core/parallel.h"
#include "cpu/row_sink.h"

namespace te::cpu {
namespace {

constexpr int64_t kElementsPerThread = 1 << 15;
constexpr float kInfinity = std::numeric_limits<float>::infinity();

int64_t grain_of(int64_t classes) { return kElementsPerThread / classes + 1; }

template <class T>
void forward_row(const CrossEntropyForwardArgs& args, int64_t row) {
  const int64_t rows = args.logits.size(0), classes = args.logits.size(1);
  const T* x = args.logits.ptr<T>() + row * classes;
  float largest = -kInfinity;
  for (int64_t j = 0; j < classes; ++j)
    if (const float value = static_cast<float>(x[j]); value > largest) largest = value;
  const float shift = largest == -kInfinity ? 0.0f : largest;
  double total = 0.0, spread = 0.0;
  for (int64_t j = 0; j < classes; ++j) {
    const float value = static_cast<float>(x[j]) - shift;
    total += static_cast<double>(std::exp(value));
    spread += static_cast<double>(value);
  }
  const int label = args.labels.ptr<int>()[row];
  float* sums = args.sums.ptr<float>() + row;
  sums[0] = largest;
  sums[rows] = static_cast<float>(total);
  sums[2 * rows] = label == kIgnored               ? 0.0f
                   : label >= 0 && label < classes ? static_cast<float>(x[label]) - shift
                                                   : std::numeric_limits<float>::quiet_NaN();
  sums[3 * rows] = static_cast<float>(spread);
}

template <class T>
void backward_row(const CrossEntropyBackwardArgs& args, int64_t row, std::vector<float>& dx) {
  const int64_t classes = args.logits.size(1);
  const T* x = args.logits.ptr<T>() + row * classes;
  const int label = args.labels.ptr<int>()[row];
  const float log_sum = args.log_sums.ptr<float>()[row];
  const float factor = args.factors ? args.factors.ptr<float>()[row] : 1.0f;
  for (int64_t j = 0; j < classes; ++j) {
    float value = std::exp(static_cast<float>(x[j]) - log_sum) - args.evenly;
    if (j == label) value -= 1.0f - args.smoothing;
    dx[static_cast<size_t>(j)] = label == kIgnored ? 0.0f : factor * value;
  }
}

}  // namespace

void cross_entropy_forward(const CrossEntropyForwardArgs& args) {
  const int64_t rows = args.logits.size(0), grain = grain_of(args.logits.size(1));
  dispatch_high_precision(args.logits.dtype, "cross_entropy_forward", [&](auto tag) {
    using T = typename decltype(tag)::type;
    parallel_for(rows, grain, [&](int64_t first, int64_t last) {
      for (int64_t row = first; row < last; ++row) forward_row<T>(args, row);
    });
  });
}

void cross_entropy_backward(const CrossEntropyBackwardArgs& args) {
  const int64_t rows = args.logits.size(0), classes = args.logits.size(1);
  const RowSink sink(rows, classes, args.dx, args.codes, {});
  dispatch_high_precision(args.logits.dtype, "cross_entropy_backward", [&](auto tag) {
    using T = typename decltype(tag)::type;
    sink.write_all(grain_of(classes),
                   [&](int64_t row, std::vector<float>& dx) { backward_row<T>(args, row, dx); });
  });
}

}  // namespace te::cpu
